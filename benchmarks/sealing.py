"""A sealed exchange: seconds and bytes for 4, 16 and 64 recipients.

A site makes its handshake, checks those of its recipients, seals its private tensors for all of them in one envelope, and opens
a peer's envelope. The recipients share one RSA key, because making 64 takes longer than what is measured.
"""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from nvflare.lighter.utils import Identity as Owner
from nvflare.lighter.utils import generate_cert, generate_keys

from benchmarks.common import count, interleaved, parser, report
from feddp.networks import DEFAULT
from feddp.plan.resolve import build_network, exchanged, partition_of
from feddp.plan.schema import Plan
from feddp.sealing.envelope import Binding, seal, unseal
from feddp.sealing.handshake import Peer, introduce, meet
from feddp.sealing.identity import Identity

JOB, EXCHANGE, TASK = "job", "calibration", "collect"


def main(arguments: Sequence[str]) -> None:
    options = parser("sealing", __doc__)
    options.add_argument("--recipients", type=count, nargs="+", default=[4, 16, 64])
    options.add_argument("--pairs", type=count, default=9)
    options.add_argument("--network", default=DEFAULT)
    options.add_argument("--method", default="feddp")
    given = options.parse_args(arguments)
    plan = Plan(given.method, given.network, 3, ("lesion",), "nested", 32, rounds=1)
    network = build_network(plan)
    tensors = {name: network.state_dict()[name] for name in exchanged(plan, partition_of(plan, network))}
    plain = sum(value.nbytes for value in tensors.values())
    most = max(given.recipients)
    sites = identities(most + 1)
    said = [introduce(site, JOB, EXCHANGE) for site in sites]
    own, binding, rows, figures = sites[0], Binding(JOB, TASK), [], {}
    for recipients in given.recipients:
        check = partial(met, own, list(zip(sites, said, strict=True))[1 : recipients + 1])
        peers = check()
        envelope = seal(own, binding, peers, tensors)
        calls: dict[str, Callable[[], object]] = {
            "introduce": partial(introduce, own, JOB, EXCHANGE),
            "check": check,
            "seal": partial(seal, own, binding, peers, tensors),
            "open": partial(unseal, sites[1], own.name, envelope, binding, said[1][1]),
        }
        seconds = interleaved(f"{recipients} recipients", given.pairs, calls)
        beside = len(envelope) - plain
        rows.append((recipients, *(f"{median(values):.4f}" for values in seconds.values()), len(envelope), beside))
        figures[recipients] = {"seconds": seconds, "bytes": len(envelope), "beside": beside}
    heads = ("recipients", "s: make one", "s: check handshakes", "s: seal", "s: open one", "bytes", "of which not tensors")
    about = {"network": given.network, "method": given.method, "tensors": plain, "handshake": len(said[0][0])}
    report("sealing", heads, rows, about | {"recipients": figures})


def met(own: Identity, others: Sequence[tuple[Identity, tuple[bytes, X25519PrivateKey]]]) -> list[Peer]:
    return [meet(own, site.name, message, JOB, EXCHANGE) for site, (message, _) in others]


def identities(number: int) -> list[Identity]:
    """Returns sites of one project, with certificates as FLARE makes them."""
    root_key, root_public = generate_keys()
    project = Owner("project")
    root = generate_cert(project, project, root_key, root_public, ca=True)
    key, public = generate_keys()
    names = [f"site-{at:03}" for at in range(number)]
    certificates = {name: generate_cert(Owner(name, "hospital"), project, root_key, public) for name in names}
    return [Identity(name, certificate, key, root, "server") for name, certificate in certificates.items()]
