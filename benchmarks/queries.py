"""What private queries do in a finished run of FedDP: how far they drift apart, and what changes if sites exchange them.

A run without calibration, because the calibration trains all tensors of a site:

    feddp run --env local --method feddp --calibration-epochs 0 --data DATA --out RUN ...
    feddp bench queries RUN --data DATA

Each site's network predicts its test images with its own queries, with the mean of the sites', with each other site's, and
with those from before the first round; and so its training images: what own queries gain there and not on test images, they
have learned by heart. For each attention layer: the number of keys; how far queries, keys and values moved from the start, ‖w
- w₀‖ / ‖w₀‖; how far apart the sites' queries are, mean ‖q_k - q̄‖ / ‖q̄ - q₀‖; and how much of the attention (total
variation, 0 to 1) lies on other keys with own queries than with the mean of the sites', and than with equal weights. Then the
gradients that reach q, k and v: the root mean square of an element of ∂L_seg/∂w in a batch of training images, before the
first round and of the run's networks. Adam divides by them, so that a small gradient moves a weight as far as a large one,
unless it comes near Adam's ε of 1e-8. At last, where the run's workspace is still there (`feddp compare` removes it), the
moments that each site's Adam had after its last round: the root mean square of m̂ / (√v̂ + ε), which is the length of a step as a
share of the learning rate. It is 1 if the gradient is always the same, and after many steps √((1 - β₁) / (1 + β₁)) = 0.23 if
gradients are independent of one another with a mean of 0, so that steps lead nowhere (after few steps it is more: 1 after the
first). Kingma & Ba (2015, section 2.1) call m̂ / √v̂ a signal-to-noise ratio.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor, nn

from benchmarks.common import finished, image_dice, of_a_run, report
from feddp.data.images import SPLIT
from feddp.data.loading import Sample, batches, load
from feddp.data.progress import track
from feddp.errors import InputError
from feddp.flare.kept import files_of, kept_below
from feddp.jobs.folder import LOCAL
from feddp.methods import METHODS
from feddp.methods.aggregation import average
from feddp.networks.attention import SplitAttention
from feddp.partition import QUERY, Tensors, select
from feddp.plan.resolve import build_network
from feddp.plan.schema import Plan
from feddp.run.join import first_of
from feddp.run.session import WORKSPACE
from feddp.terminal import note
from feddp.training.loop import adamw, copy_of, predict
from feddp.training.losses import segmentation_loss
from feddp.training.store import Store, restore_optimizer

MOVED = ("q", "k", "v")
TRAINED = "train"


def main(arguments: Sequence[str]) -> None:
    about = "a finished run with private queries and without calibration"
    given = of_a_run("queries", __doc__, about).parse_args(arguments)
    plan, networks, folders = finished(given.run, given.data)
    require_own(plan, networks)
    steps = moments(given.run, plan, networks)
    start = build_network(plan)
    start.load_state_dict(first_of(given.run, plan))
    figures = {"rounds": plan.rounds, "size": plan.size, "network": plan.network, "seed": plan.seed}
    samples = {
        split: {site: load(folder, split, plan.size, plan.training.normalise) for site, folder in folders.items()}
        for split in (SPLIT, TRAINED)
    }
    for split, images in samples.items():
        exchange = dice(start, networks, images)
        rows = [(whose, *(f"{value:.2f}" for value in values.values())) for whose, values in exchange.items()]
        report("queries", (f"{split} Dice (%) with queries", *networks), rows, figures | {"split": split, "dice": exchange})
    for name, layers in (
        ("layers", attention(start, networks, samples[SPLIT])),
        ("gradients", gradients(plan, start, networks, samples[TRAINED])),
        *((("moments", steps),) if steps else ()),
    ):
        cells = [(path, *(f"{value:.4g}" for value in found.values())) for path, found in layers.items()]
        report("queries", ("layer", *next(iter(layers.values()))), cells, figures | {name: layers})


def require_own(plan: Plan, networks: Mapping[str, nn.Module]) -> None:
    """InputError unless the sites' networks differ in their queries, and are those that the rounds trained."""
    states = {site: network.state_dict() for site, network in networks.items()}
    names = select(next(iter(networks.values())), QUERY)
    if not names or not all(differ(states, name) for name in names):
        raise InputError(f"the sites' networks of {plan.method} have the same queries; name a run with private queries")
    if METHODS[plan.method].personal:
        raise InputError(f"the sites' networks of {plan.method} are personal as a whole; name a run with private queries")


def dice(
    start: nn.Module, networks: Mapping[str, nn.Module], samples: Mapping[str, list[Sample]]
) -> dict[str, dict[str, float]]:
    """Returns {whose queries: {site: mean Dice of its images, in per cent}}."""
    states = {site: copy_of(network) for site, network in networks.items()}
    names = select(next(iter(networks.values())), QUERY)
    queries = {site: {name: state[name] for name in names} for site, state in states.items()}
    central = average(queries, dict.fromkeys(queries, 1.0))
    first = {name: tensor for name, tensor in start.state_dict().items() if name in names}
    found: dict[str, dict[str, float]] = {"own": {}, "mean of the sites": {}, "another site": {}, "start": {}}
    for site in track(networks, "Exchanging queries"):
        others = [values for name, values in queries.items() if name != site]
        for row, sets in zip(found.values(), ([queries[site]], [central], others, [first]), strict=True):
            row[site] = mean(scored(networks[site], states[site] | given, samples[site]) for given in sets)
        networks[site].load_state_dict(states[site])
    return found


def differ(states: Mapping[str, Tensors], name: str) -> bool:
    first, *others = (state[name] for state in states.values())
    return any(not torch.equal(first, other) for other in others)


def scored(network: nn.Module, state: Tensors, samples: list[Sample]) -> float:
    network.load_state_dict(state)
    return mean(image_dice(network, samples))


@torch.no_grad()
def attention(
    start: nn.Module, networks: Mapping[str, nn.Module], samples: Mapping[str, list[Sample]]
) -> dict[str, dict[str, float]]:
    """Returns {attention layer: {quantity: mean over the sites}}; the head of this file says of what."""
    before = dict(start.named_modules())
    own = {site: dict(network.named_modules()) for site, network in networks.items()}
    rows = {}
    for path in track([path for path, layer in before.items() if isinstance(layer, SplitAttention)], "Comparing attention"):
        layers = {site: modules[path] for site, modules in own.items()}
        row = {f"{name} moved": mean(far(layer, before[path], name) for layer in layers.values()) for name in MOVED}
        centre = torch.stack([flat(layer.q) for layer in layers.values()]).mean(dim=0)
        apart = mean((flat(layer.q) - centre).norm().item() for layer in layers.values())
        row["queries apart"] = apart / (centre - flat(before[path].q)).norm().item()
        central = average({site: layer.q.state_dict() for site, layer in layers.items()}, dict.fromkeys(layers, 1.0))
        keys, *found = zip(*(shares(networks[site], layers[site], central, samples[site]) for site in networks), strict=True)
        rows[path] = {"keys": keys[0]} | row | dict(zip(("own / mean", "own / equal"), map(mean, found), strict=True))
    return rows


def gradients(
    plan: Plan, start: nn.Module, networks: Mapping[str, nn.Module], samples: Mapping[str, list[Sample]]
) -> dict[str, dict[str, float]]:
    """Returns {attention layer: {"q before": ..., "q after": ...}}, means over the sites of `gradient`."""
    found: dict[str, dict[str, float]] = {}
    for when, each in (("before", dict.fromkeys(networks, start)), ("after", networks)):
        sites = [gradient(network, samples[site], plan) for site, network in track(each.items(), "Gradients", len(each))]
        for path in sites[0]:
            row = found.setdefault(path, {})
            row |= {f"{name} {when}": mean(site[path][name] for site in sites) for name in MOVED}
    return found


def gradient(network: nn.Module, samples: list[Sample], plan: Plan) -> dict[str, dict[str, float]]:
    """Returns {attention layer: {child of MOVED: root mean square of its weight's gradient, mean over the batches}}."""
    loss, count = segmentation_loss(plan.training.loss), 0
    layers = {path: layer for path, layer in network.named_modules() if isinstance(layer, SplitAttention)}
    sums = {path: dict.fromkeys(MOVED, 0.0) for path in layers}
    network.eval()
    for batch in batches(samples, plan.training.batch, seed=None, augment=False):
        network.zero_grad()
        loss(network(batch["image"]), batch["mask"]).backward()
        count += 1
        for path, layer in layers.items():
            for name in MOVED:
                grad = layer.get_submodule(name).get_parameter("weight").grad
                sums[path][name] += 0.0 if grad is None else grad.square().mean().sqrt().item()
    return {path: {name: value / count for name, value in row.items()} for path, row in sums.items()}


def moments(run: Path, plan: Plan, networks: Mapping[str, nn.Module]) -> dict[str, dict[str, float]]:
    """Returns {attention layer: {child of MOVED: `step` of its weight after the last round, mean over the sites}}.

    Without the workspace of a run with `--env local`, or where a site missed the last round, it says so on stderr, and
    returns {}.

    Raises:
        InputError: a site's state after the last round is damaged.
    """
    found: dict[str, dict[str, list[float]]] = {}
    steps = plan.rounds * plan.phases
    for site, network in networks.items():
        folder = files_of(kept_below(run / WORKSPACE / site), LOCAL)
        if not folder.is_dir() or Store(folder).latest() < steps:
            note(f"{folder} has no state after step {steps}: nothing on the steps of {site}'s Adam")
            return {}
        kept = Store(folder).read_state(steps).optimizer
        optimizer = adamw(network, plan.training.lr, plan.training.weight_decay)
        restore_optimizer(optimizer, network, kept)
        for path, layer in network.named_modules():
            if isinstance(layer, SplitAttention):
                for name in MOVED:
                    weight = layer.get_submodule(name).get_parameter("weight")
                    found.setdefault(path, {}).setdefault(name, []).append(step(optimizer, weight))
    return {path: {name: mean(values) for name, values in row.items()} for path, row in found.items()}


def step(optimizer: torch.optim.AdamW, weight: Tensor) -> float:
    """The root mean square over a weight's elements of m̂ / (√v̂ + ε): its last step, without decay, over the learning rate.

    It is not a number if the weight was not trained.
    """
    (group,), state = optimizer.param_groups, optimizer.state.get(weight)
    if not state:
        return math.nan
    first, second = (1 - beta ** state["step"].item() for beta in group["betas"])
    m, v = state["exp_avg"] / first, state["exp_avg_sq"] / second
    return float((m / (v.sqrt() + group["eps"])).square().mean().sqrt())


def flat(layer: nn.Module) -> Tensor:
    return torch.cat([value.detach().flatten() for value in layer.parameters()])


def far(layer: nn.Module, start: nn.Module, name: str) -> float:
    """‖w - w₀‖ / ‖w₀‖ of a child's weight and bias."""
    before = flat(start.get_submodule(name))
    moved = flat(layer.get_submodule(name)) - before
    return float(moved.norm() / before.norm())


def shares(network: nn.Module, layer: SplitAttention, central: Tensors, samples: list[Sample]) -> tuple[int, float, float]:
    """Returns the number of keys, and the total variation of the attention from that of `central` and from equal weights."""
    taken: dict[str, Tensor] = {}
    hooks = [
        layer.q.register_forward_pre_hook(lambda _, given: taken.__setitem__("tokens", given[0])),
        layer.k.register_forward_hook(lambda _, __, out: taken.__setitem__("keys", out)),
    ]
    sums, count, keys = torch.zeros(2), 0, 0
    for maps, _ in predict(network, samples):
        own, other = (weights(layer, taken["tokens"], taken["keys"], q) for q in (layer.q.state_dict(), central))
        keys = own.shape[-1]
        for i, against in enumerate((other, torch.full_like(own, 1 / keys))):
            sums[i] += (own - against).abs().sum(dim=-1).mean() / 2 * len(maps)
        count += len(maps)
    for hook in hooks:
        hook.remove()
    return keys, *(sums / count).tolist()


def weights(layer: SplitAttention, tokens: Tensor, keys: Tensor, query: Tensors) -> Tensor:
    """softmax(q kᵀ / √d): (B, heads, queries, keys)."""
    queries = nn.functional.linear(tokens, query["weight"], query.get("bias"))
    one, other = (each.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2) for each in (queries, keys))
    found: Tensor = (layer.scale * one @ other.transpose(-2, -1)).softmax(dim=-1)
    return found
