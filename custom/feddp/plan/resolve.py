"""Resolves a plan to its network, its private tensors, its exchanged tensors and the initial tensors of its job."""

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from feddp.errors import InputError
from feddp.files import WEIGHTS
from feddp.lean import meta_device
from feddp.methods import METHODS
from feddp.methods.base import TUNE, Method
from feddp.networks import NETWORKS, build
from feddp.networks.weights import fingerprint, read_network
from feddp.partition import ADAPTER, HEAD, KEY, QUERY, Partition, chosen, resolve
from feddp.plan.schema import Plan
from feddp.training.seeds import seed_of


def build_network(plan: Plan, weights: str | None = None) -> nn.Module:
    """Returns the initial network, equal at all participants, from the seed; `weights="timm"` fetches encoder weights."""
    return build(plan.network, plan.channels, len(plan.classes), weights, seed_of(plan.seed, "network"), plan.layers)


def build_method(plan: Plan) -> Method:
    """Returns the plan's method with its hyper-parameters."""
    return METHODS[plan.method](plan.hyper)


def partition_of(plan: Plan, network: nn.Module) -> Partition:
    """Returns the partition of the network by the plan's private rule.

    Raises:
        InputError: the rule selects no tensor, or all tensors.
    """
    return resolve(network, plan.rule)


def require_runnable(plan: Plan) -> None:
    """Raises InputError if no run of the plan can begin; asked before a job or a run's folder is written.

    A hospital is asked no such plan: its own bounds refuse too few sites (`feddp.flare.bounds`).
    """
    partition_of(plan, build_network(plan))
    count, least = len(plan.sites), plan.federation.min_sites
    if METHODS[plan.method].federated and count < least:
        raise InputError(f"{count} sites are fewer than min_sites={least}; name more sites, or lower min_sites")


# the most keys of any attention of a network (0: it has none), by what it is built from and the images' size: to count them
# takes 0.3 CPU-seconds, and the runs of a comparison have few networks
_MOST_KEYS: dict[tuple[object, ...], int] = {}


def idle_queries(plan: Plan) -> str:
    """Returns a warning if the plan keeps queries private that have no effect, else "".

    An attention with one key gives it the weight 1, whatever query and key are: its output is the value, on which LoRA's
    adapters of v act. The networks pvt_v2_b0-fpn, pvt_v2_b1-fpn and pvt_v2_b2-fpn have one key in every layer at 32 pixels.
    """
    roles = [role for role in plan.rule if role in (QUERY, KEY, ADAPTER)]
    if not roles:
        return ""
    network = (NETWORKS[plan.network], plan.channels, len(plan.classes), json.dumps(plan.layers), plan.size)
    if network not in _MOST_KEYS:
        from feddp.networks.attention import keys_of

        # copied there: initial values take as long on the meta device, and a run has built its network before
        keys = keys_of(build_network(plan).to(meta_device()), plan.channels, plan.size)
        _MOST_KEYS[network] = max(keys, default=0)
    if _MOST_KEYS[network] != 1:
        return ""
    what = f"every attention of {plan.network} has one key at {plan.size} pixels, so queries and keys have no effect"
    private = ", ".join("adapters of q and k" if role == ADAPTER else role for role in roles)
    rest = " (those of v act)" if ADAPTER in roles else ""
    return f"{what}: private {private} can show nothing of them there{rest}; raise --size"


def exchanged(plan: Plan, partition: Partition) -> tuple[str, ...]:
    """Returns the tensors from which IGC's peers rebuild a site's network: the private ones; all if shared ones differ too."""
    whole = TUNE in plan.stages or METHODS[plan.method].personal
    return partition.shared + partition.private if whole else partition.private


def head_names(network: nn.Module) -> tuple[str, ...]:
    """Returns the tensors that FedLC's peers exchange in every epoch: the segmentation head's, in state_dict order."""
    head = chosen(network, (HEAD,))
    return tuple(name for name in network.state_dict() if name in head)


def initial_tensors(plan: Plan, folder: Path) -> dict[str, Tensor] | None:
    """Returns the initial tensors that the job brought in `folder`, or None if the plan has none.

    Raises:
        InputError: the file cannot be read, or its tensors are not those of the plan's fingerprint.
    """
    if not plan.weights:
        return None
    tensors, _ = read_network(folder / WEIGHTS)
    require_initial(plan, str(folder / WEIGHTS), tensors)
    return tensors


def require_initial(
    plan: Plan, where: str, tensors: Mapping[str, Tensor] | None, remedy: str = "export the job anew, and submit that"
) -> None:
    """Raises InputError if `tensors`, which come from `where`, do not have the plan's fingerprint."""
    actual = fingerprint(tensors) if tensors else ""
    if actual != plan.weights:
        here, wanted = (f"tensors of SHA-256 {sha}" if sha else "no initial tensors" for sha in (actual, plan.weights))
        raise InputError(f"{where}: {here}, but the job's plan has {wanted}; {remedy}")
