"""Local Train: each site alone, no exchange (Wang et al., TMI 2024, Table I).

Each site deploys the best round of its own, as in the released code; the networks of a run may be of different rounds.
`results.json` names each site's round, unless the site withholds its scores.

Deviations: the sites train in step, so that their curves compare; nothing is shared, so no tensor travels.
"""

from feddp.methods.base import Method
from feddp.partition import ALL


class Local(Method):
    private = (ALL,)
    best_per_site = True
