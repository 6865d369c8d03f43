"""Initial tensors: a job may carry a network, which every site receives first and starts from."""

from collections.abc import Mapping

from torch import Tensor

from feddp import protocol
from feddp.errors import FedDPError
from feddp.partition import Tensors
from feddp.plan.resolve import require_initial
from feddp.protocol import Sent
from feddp.stages.host import Host
from feddp.stages.message import Message
from feddp.stages.server import Server
from feddp.training.store import INITIAL


def hand_over(server: Server) -> None:
    """Sends every site the network that the job carries, if it carries one. Done once per job.

    It travels in full precision, also in half-precision runs: every site compares its fingerprint with the plan's.

    Raises:
        FedDPError: the job's tensors are not a whole network, or fewer than `min_sites` accepted it.
    """
    memory = server.memory
    if memory.handed_over or (initial := memory.brought()) is None:
        return
    memory.expected.check(Sent.MODEL, "the job", initial)
    server.ask(protocol.INITIAL, Message(initial), ())
    memory.handed_over = True


def keep(host: Host, tensors: Mapping[str, Tensor]) -> None:
    """Stores the network that the job carries: this site starts from it, private tensors included.

    Raises:
        FedDPError: the tensors are not exactly the plan's.
    """
    host.expected.check(Sent.MODEL, f"{host.name} was sent initial tensors", tensors)
    require_initial(host.plan, f"site {host.name} was sent", tensors)
    host.claim()
    host.store.write(INITIAL, tensors)


def first_network(host: Host) -> Tensors | None:
    """Returns the tensors that `keep` stored, or None if the plan's seed initialises the network.

    Raises:
        FedDPError: this site was absent when the server sent the initial tensors.
    """
    if not host.plan.weights:
        return None
    if not host.store.has(INITIAL):
        raise FedDPError(
            f"site {host.name}: the job starts from initial tensors, and this site was absent when the server sent them"
            " (task initial); the site skips this job; submit the job again when the site is connected"
        )
    return host.store.read(INITIAL)[0]
