"""FedDP (Wang et al., TMI 2024, Algorithm 1): local query, then inconsistency-guided calibration.

Stage 1 (Eq. 4, 5): the query embedding of every attention block, weight and bias, is private; v_k = γ^t ∪ ρ_k^t is trained
as a whole for one local epoch, and γ^{t+1} = mean γ_k. Stage 2 (Eq. 6 to 8) is `feddp.training.calibration`.

Deviations: the optimiser's state is kept at the site from round to round (as in the released code; the paper does not say).
The released code writes the mean into the first site's live tensors, private ones included; ours does not. The loss is Dice +
cross-entropy (`loss=dice` is the released code's). The best round is selected on a validation split (`selection=test` is the
paper's). The released code always starts from ImageNet weights (`--weights`), divides images by 255 (`normalise=scale`), does
not augment (`augment=false`), reports medpy's ASSD (`assd-medpy`) and keeps, on fundus images, the largest component
(`largest_component=true`); none of these is our default.

Further, the released code has Adam where the paper and ours have AdamW, batches of 8 images by default (`batch=8`; the paper:
6), epochs of 300 random draws, λ = 0 by default, and no clipping of gradients after the rounds. Its scripts train at 1e-4 from
the first round on fundus images (`lr=1e-4`), and tune for 30 epochs there, for 50 on polyps (`calibration_epochs`; the paper:
20). Before it measures, it sets a pixel at the corner of an empty prediction of a polyp, and every pixel of one of a fundus
image; here an empty prediction stays so (`feddp.training.metrics`).
"""

from feddp.methods.base import CALIBRATE, TRAIN, Method
from feddp.partition import QUERY


class FedDP(Method):
    private = (QUERY,)
    stages = (TRAIN, CALIBRATE)
