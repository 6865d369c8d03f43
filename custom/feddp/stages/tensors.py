"""The tensors of each answer: one rule for a site's guard, for the server and for the site that receives them."""

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor, nn

from feddp.domains import Domain, amplitudes, domains
from feddp.errors import ContributionError
from feddp.methods.aggregation import Spec
from feddp.partition import Partition, Tensors
from feddp.plan.resolve import build_network, exchanged, head_names, partition_of
from feddp.plan.schema import Plan
from feddp.protocol import Sent
from feddp.training.spectra import radius

AMPLITUDE = "amplitude"  # (N, channels, 2b+1, 2b+1): N means over groups of patients


class Expected:
    """Names, shapes, types and domains of the tensors in a plan's answers.

    Args:
        network: the plan's network, where it is built already.
    """

    def __init__(self, plan: Plan, network: nn.Module | None = None):
        self.plan = plan
        if network is not None:
            self.network = network

    @cached_property
    def network(self) -> nn.Module:
        """The plan's network, untrained: for the names, shapes and types of its tensors."""
        return build_network(self.plan)

    @cached_property
    def partition(self) -> Partition:
        return partition_of(self.plan, self.network)

    @cached_property
    def domains(self) -> dict[str, Domain]:
        """The values that each tensor of the network may hold."""
        return domains(self.network)

    def parameters(self, tensors: Mapping[str, Tensor]) -> Tensors:
        """Returns the parameters among some of the network's tensors, without the buffers."""
        names = dict(self.network.named_parameters(remove_duplicate=False))  # a module registered twice has two names
        return {name: value for name, value in tensors.items() if name in names}

    def names(self, sent: Sent) -> tuple[str, ...]:
        """Returns their names; all are required."""
        if sent is Sent.SHARED:
            return self.partition.shared
        if sent is Sent.PERSONAL:
            return exchanged(self.plan, self.partition)
        if sent is Sent.HEADS:
            return head_names(self.network)
        if sent is Sent.AMPLITUDES:
            return (AMPLITUDE,)
        return tuple(self.network.state_dict()) if sent is Sent.MODEL else ()

    def spec(self, sent: Sent, means: int | None = None) -> Spec:
        """Returns their shapes, types and domains; amplitudes are so many `means`, default: the plan's maximum."""
        if sent is Sent.AMPLITUDES:
            side = 2 * radius(self.plan.size, self.plan.size) + 1
            count = self.plan.hyper.spectra if means is None else means
            shape = torch.Size((count, self.plan.channels, side, side))
            return Spec({AMPLITUDE: (shape, torch.float32)}, {AMPLITUDE: amplitudes(self.plan.size)})
        return Spec.of(self.network.state_dict(), self.names(sent), self.domains)

    def check(self, sent: Sent, site: str, tensors: Mapping[str, Tensor]) -> None:
        """Refuses anything but exactly these tensors, with finite values in their domains (`feddp.domains`).

        Raises:
            ContributionError: names the site, the tensor and what is wrong with it.
        """
        if sent is Sent.NONE and tensors:
            raise ContributionError(f"site {site}: it sent {len(tensors)} tensors where numbers were asked for")
        means = None
        if sent is Sent.AMPLITUDES:  # from 1 to the plan's maximum
            value = tensors.get(AMPLITUDE)
            count = len(value) if isinstance(value, Tensor) and value.ndim else 1
            means = min(max(count, 1), self.plan.hyper.spectra)
        self.spec(sent, means).check(site, tensors)
