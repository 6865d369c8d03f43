"""FedDG's exchange before the first round: what a site gives, what anyone accepts of it, what a site keeps.

Images stay. What travels is the centre of the amplitude spectra of at most `spectra` training images a site, as the network
would be given them, without their phase and without their names.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from feddp.methods.aggregation import Spec, Tensors
from feddp.training.seeds import seed_of
from feddp.training.spectra import radius, windows

if TYPE_CHECKING:
    from feddp.methods.trainer import Trainer
    from feddp.plan.schema import Plan

AMPLITUDE, SLOT = "amplitude", "spectra"


def given(site: "Trainer") -> Tensors:
    """AMPLITUDE: (N, channels, 2b+1, 2b+1) of N training images, drawn at the site. To be given with consent only.

    Every job is given the same images at a real site: job after job would otherwise collect them all.
    """
    chance = torch.Generator().manual_seed(seed_of(*site.standing(SLOT)))
    drawn = torch.randperm(len(site.samples), generator=chance)[: site.plan.hyper.spectra].tolist()
    return {AMPLITUDE: windows(torch.stack([site.samples[i]["image"] for i in drawn]))}


def check(plan: "Plan", site: str, tensors: Mapping[str, Tensor]) -> None:
    """Refuses anything but the amplitudes of 1 to `spectra` images. ContributionError names the site and what is wrong."""
    value = tensors.get(AMPLITUDE)
    count = len(value) if isinstance(value, Tensor) and value.ndim else 1
    _spec(plan, min(max(count, 1), plan.hyper.spectra)).check(site, tensors)


def limit(plan: "Plan") -> int:
    """The bytes of all that a site may give."""
    return _spec(plan, plan.hyper.spectra).nbytes


def _spec(plan: "Plan", count: int) -> Spec:
    side = 2 * radius(plan.size, plan.size) + 1
    return Spec({AMPLITUDE: (torch.Size((count, plan.channels, side, side)), torch.float32)})


def keep(site: "Trainer", peers: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Puts the peers' amplitudes among the site's files until its evaluation; none where there is no peer.

    Raises:
        ContributionError: a peer's tensors are not exactly amplitudes; nothing is kept.
    """
    for peer, tensors in peers.items():
        check(site.plan, peer, tensors)
    site.store.remove(SLOT)
    if peers:
        site.store.write(SLOT, {peer: tensors[AMPLITUDE] for peer, tensors in peers.items()})


def received(site: "Trainer") -> Tensor | None:
    """All that the peers gave, (M, channels, 2b+1, 2b+1), in the order of their names; None where nobody gave anything."""
    if not site.store.has(SLOT):
        return None
    peers, _ = site.store.read(SLOT)
    return torch.cat([peers[name] for name in sorted(peers)])
