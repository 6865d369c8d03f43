"""How far honest rounds move the shared tensors, in units of the bounds that sites and server keep (`feddp.stages.movement`).

Whole runs of each method in one process, on synthetic images or on the sites below --data. Of each run: the largest share of
the bound that any parameter came to, in a contribution, or in the shared tensors that a site received; the same of running
statistics and counters; and the largest share of both for a site that would take part for the first time in that round, whose
bound counts from the first tensors. A share above 1 would have been refused.

    feddp bench movement --methods fedavg feddp --rounds 200 --network small --sites 2 --images 6 --set batch=2
    feddp bench movement --rounds 20 --network resnet18-fpn --set precision=float16
"""

import shutil
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest.mock import patch

from torch import Tensor

from benchmarks.common import count, line, natural, parser, pixels, row
from benchmarks.small import narrow_resnet, shallow
from feddp.data.progress import track
from feddp.data.synthesize import synthesize
from feddp.domains import WEIGHT
from feddp.methods import METHODS
from feddp.networks import DEFAULT, NETWORKS
from feddp.run.options import Options, run_here
from feddp.stages.movement import Furthest, Reach
from feddp.stages.site import Site
from feddp.training.store import State

PARAMETERS, OTHERS = KINDS = ("parameters", "statistics and counters")
# no run of FedDP knows them: the default network with few channels, and one with batch normalisation, for many rounds
SMALL = {"small": shallow, "small-norm": narrow_resnet}
COLUMNS = (*KINDS, LATE := "a site's first round")


def main(arguments: Sequence[str]) -> None:
    federated = [name for name, method in METHODS.items() if method.federated]
    options = parser("movement", __doc__)
    options.add_argument("--methods", nargs="+", choices=federated, default=federated, metavar="METHOD")
    options.add_argument("--data", type=Path, help="a federation's folder; default: synthetic images")
    options.add_argument("--sites", type=count, default=3, help="of synthetic images")
    options.add_argument("--images", type=count, default=24, help="of each of these sites")
    options.add_argument("--rounds", type=count, default=20)
    options.add_argument("--size", type=pixels, default=32)
    options.add_argument("--seed", type=natural, default=0)
    options.add_argument("--network", default=DEFAULT, help=f"{' and '.join(SMALL)} are this benchmark's own")
    options.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", dest="settings")
    given = options.parse_args(arguments)
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder, patch.dict(NETWORKS, SMALL):
        data = given.data or Path(folder) / "data"
        if not given.data:
            synthesize(data, given.sites, given.images, given.size)
        row("method", *COLUMNS)
        row(*["---"] * (1 + len(COLUMNS)))
        for method in track(given.methods, "Methods"):
            run = Options(method, given.rounds, None, given.network, given.size, given.seed, tuple(given.settings))
            found[method] = shares(run, data, Path(folder) / "run")
            row(method, *(f"{found[method][kind]:.3f}" for kind in COLUMNS))
    figures = {name: value for name, value in vars(given).items() if name != "methods"}
    line("movement", figures | {"data": str(given.data or "synthetic"), "shares": found})


def shares(run: Options, data: Path, out: Path) -> dict[str, float]:
    """Runs; returns {column: the largest share of a bound}. `out` is removed."""
    largest: dict[str, float] = defaultdict(float)
    measure, beyond, near = Reach.furthest, Reach.beyond, Site.require_near

    def measured(reach: Reach, before: Mapping[str, Tensor], after: Mapping[str, Tensor], times: int = 1) -> Furthest | None:
        for kind in KINDS:
            names = [name for name in after if (reach.kinds[name] is WEIGHT) == (kind == PARAMETERS)]
            if times and (one := measure(reach, before, {name: after[name] for name in names}, times)):
                largest[kind] = max(largest[kind], one.share)
        return beyond(reach, before, after, times)

    def received(site: Site, shared: Mapping[str, Tensor], state: State, step: int, steps: float) -> None:
        if step and (one := measure(Reach(site.expected, steps), site._first_shared, shared, step)):
            largest[LATE] = max(largest[LATE], one.share)
        near(site, shared, state, step, steps)

    with patch.object(Reach, "beyond", measured), patch.object(Site, "require_near", received):
        run_here(data, out, run, "local")
    shutil.rmtree(out)
    return dict.fromkeys(COLUMNS, 0.0) | largest
