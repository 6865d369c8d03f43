"""A run as a plain loop over its sites in one process: what the controllers do, without FLARE."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from feddp.data.folder import SiteFolder
from feddp.methods import spectra
from feddp.methods.aggregation import average
from feddp.methods.base import CALIBRATE, HEADS, SPECTRA, TUNE
from feddp.methods.plan import Plan
from feddp.methods.site import Site
from feddp.training.store import Store


def drive(
    plan: Plan,
    root: Path,
    folder: Path,
    names: tuple[str, ...] = ("site-1", "site-2"),
    silent: tuple[str, ...] = (),
    initial: dict[str, Tensor] | None = None,
    secrets: Mapping[str, str] | None = None,
    job: str = "",
) -> dict[str, Site]:
    """All stages of `plan`, whose start must be the last round; the sites as they are before their evaluation.

    Sites in `silent` take no part in the exchange of IGC. All start from `initial`, where it is given; `secrets` are the sites'
    own parts of their seeds, with which the job's id goes.
    """
    assert plan.start == "last"
    own = secrets or dict.fromkeys(names, "")
    sites = {
        name: Site(
            *(name, SiteFolder.open(root / name), plan, Store(folder / name)), initial=initial, secret=own[name], job=job
        )
        for name in names
    }
    if SPECTRA in plan.stages:
        given = {name: spectra.given(site) for name, site in sites.items()}
        for name, site in sites.items():
            spectra.keep(site, {peer: tensors for peer, tensors in given.items() if peer != name})
    first = sites[names[0]]
    method, shared = plan.build_method(), first.partition.split(first.copy())[0]
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
