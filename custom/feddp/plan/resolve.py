"""What a plan means: its network, which tensors are private, what is exchanged, the tensors that its job brings."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from feddp.errors import InputError
from feddp.methods import METHODS
from feddp.methods.base import TUNE, Method
from feddp.networks import build
from feddp.networks.weights import fingerprint, read_network
from feddp.partition import HEAD, Partition, chosen, resolve
from feddp.plan.schema import Plan
from feddp.training.seeds import seed_of

WEIGHTS = "weights.safetensors"  # in the config folder of the server's app, and nowhere else in a job


def build_network(plan: Plan, weights: str | None = None) -> nn.Module:
    """The common start of every participant, from the seed alone; `weights="timm"` fetches the encoder's."""
    return build(plan.network, plan.channels, len(plan.classes), weights, seed_of(plan.seed, "network"), plan.layers)


def build_method(plan: Plan) -> Method:
    """The plan's method with its hyper-parameters."""
    return METHODS[plan.method](plan.hyper)


def partition_of(plan: Plan, network: nn.Module) -> Partition:
    """Which tensors of the network are private: by the plan's own rule, or by the method's.

    Raises:
        InputError: the rule selects nothing, or everything.
    """
    return resolve(network, plan.federation.private or METHODS[plan.method].rule(plan))


def exchanged(plan: Plan, partition: Partition) -> tuple[str, ...]:
    """What rebuilds a site's network for IGC's peers: the private tensors; the whole where more than those is its own."""
    whole = TUNE in plan.stages or METHODS[plan.method].personal
    return partition.shared + partition.private if whole else partition.private


def head_names(network: nn.Module) -> tuple[str, ...]:
    """What FedLC's peers exchange in every epoch: the segmentation head's tensors, in state_dict order."""
    head = chosen(network, (HEAD,))
    return tuple(name for name in network.state_dict() if name in head)


def initial_tensors(plan: Plan, folder: Path) -> dict[str, Tensor] | None:
    """The tensors that the job brought along in `folder`, or None where the seed decides.

    Raises:
        InputError: the file cannot be read, or holds other tensors than the plan says.
    """
    if not plan.weights:
        return None
    tensors, _ = read_network(folder / WEIGHTS)
    require_initial(plan, str(folder / WEIGHTS), tensors)
    return tensors


def require_initial(plan: Plan, where: str, tensors: Mapping[str, Tensor] | None) -> None:
    """InputError where `tensors`, found at `where`, are not those whose fingerprint the plan says."""
    found = fingerprint(tensors) if tensors else ""
    if found != plan.weights:
        here, wanted = (f"tensors of SHA-256 {said}" if said else "no initial tensors" for said in (found, plan.weights))
        raise InputError(f"{where}: {here}, and the job's plan says {wanted}; export the job anew, and submit that")
