"""A run as a plain loop over its sites in one process: what the controllers do, without FLARE."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from feddp.data.folder import SiteFolder
from feddp.methods import spectra
from feddp.methods.aggregation import average
from feddp.methods.base import CALIBRATE, HEADS, SPECTRA, TUNE
from feddp.methods.site import Site
from feddp.plan.resolve import build_method
from feddp.plan.schema import Plan
from feddp.training.store import Store


class _Fresh(Mapping):
    """Sites, each opened anew whenever it is asked for."""

    def __init__(self, names: tuple[str, ...], opened: Callable[[str], Site]):
        self._names, self._opened = names, opened

    def __getitem__(self, name: str) -> Site:
        torch.rand(7)  # no draw of a site's may depend on what the process has drawn before
        return self._opened(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def drive(
    plan: Plan,
    root: Path,
    folder: Path,
    names: tuple[str, ...] = ("site-1", "site-2"),
    silent: tuple[str, ...] = (),
    initial: dict[str, Tensor] | None = None,
    secrets: Mapping[str, str] | None = None,
    job: str = "",
    fresh: bool = False,
) -> Mapping[str, Site]:
    """All stages of `plan`, whose start must be the last round; the sites as they are before their evaluation.

    Sites in `silent` take no part in the exchange of IGC. All start from `initial`, where it is given; `secrets` are the sites'
    own parts of their seeds, with which the job's id goes. `fresh`: each task finds a site that has just been opened, which
    knows what is on its disk, as where FLARE starts a process for every task.
    """
    assert plan.start == "last"
    own = secrets or dict.fromkeys(names, "")

    def opened(name: str) -> Site:
        data, store = SiteFolder.open(root / name), Store(folder / name)
        return Site(name, data, plan, store, initial=initial, secret=own[name], job=job)

    sites = _Fresh(names, opened) if fresh else {name: opened(name) for name in names}
    if SPECTRA in plan.stages:
        given = {name: spectra.given(site) for name, site in sites.items()}
        for name, site in sites.items():
            spectra.keep(site, {peer: tensors for peer, tensors in given.items() if peer != name})
    first = sites[names[0]]
    method, shared = build_method(plan), first.partition.split(first.copy())[0]
    for t in range(plan.rounds):
        for phase in range(plan.phases):
            sent = {name: site.train(shared, t, phase=phase)[0] for name, site in sites.items()}
            shared = method.aggregate(shared, average(sent, dict.fromkeys(names, 1.0)))
    for site in sites.values():
        site.adopt(shared, plan.rounds)
    if TUNE in plan.stages:
        for site in sites.values():
            site.tune()
    if HEADS in plan.stages:
        for epoch in range(1, plan.calibration.calibration_epochs + 1):
            heads = {name: site.head(epoch) for name, site in sites.items()}
            for name, site in sites.items():
                site.calibrate_heads({peer: head for peer, head in heads.items() if peer != name}, epoch)
    if CALIBRATE in plan.stages:
        given = {name: site.personal() for name, site in sites.items() if name not in silent}
        for name, site in sites.items():
            site.calibrate({peer: tensors for peer, tensors in given.items() if name in given and peer != name and tensors})
    return sites
