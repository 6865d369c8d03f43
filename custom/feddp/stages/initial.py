"""The network that a job brings along: every site gets it before anything else is asked, and starts from it."""

from feddp import protocol
from feddp.errors import FedDPError
from feddp.methods.aggregation import Spec
from feddp.plan.resolve import require_initial
from feddp.protocol import Sent
from feddp.stages.host import Host
from feddp.stages.message import Message
from feddp.stages.server import Server
from feddp.training.store import INITIAL, Tensors


def hand_over(server: Server) -> None:
    """Once a job: every site gets the network that the job brought along, if it did.

    It travels as it is, in half-precision runs too: every site compares its bits with the plan's fingerprint.

    Raises:
        FedDPError: the job's tensors are no whole network, or fewer than `min_sites` took it.
    """
    memory = server.memory
    if memory.handed_over or (initial := memory.brought()) is None:
        return
    memory.expected.check(Sent.MODEL, "the job", initial)
    server.ask(protocol.INITIAL, Message(initial), ())
    memory.handed_over = True


def keep(host: Host, tensors: Tensors) -> None:
    """Stores the whole network that the server's app brought: what this site starts from, private tensors included.

    Raises:
        FedDPError: the tensors are not exactly the plan's.
    """
    state = host.expected.network.state_dict()
    Spec.of(state, tuple(state)).check(f"{host.name} was sent initial tensors", tensors)
    require_initial(host.plan, f"site {host.name} was sent", tensors)
    host.store.claim(host.plan.to_json())
    host.store.write(INITIAL, tensors)


def first_network(host: Host) -> Tensors | None:
    """What `keep` stored; None where the plan's seed decides.

    Raises:
        FedDPError: it was not there when the tensors were handed over.
    """
    if not host.plan.weights:
        return None
    if not host.store.has(INITIAL):
        raise FedDPError(
            f"site {host.name}: the job starts from initial tensors, and this site was not there when they were handed over"
            " (task initial); it takes no part: submit the job again when the site has joined"
        )
    return host.store.read(INITIAL)[0]
