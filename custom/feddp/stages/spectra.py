"""FedDG's exchange before stage 1 (Liu et al., CVPR 2021): consenting sites exchange centres of amplitude spectra, once.

Images stay. What travels is the centre of the amplitude spectra of at most `spectra` training images per site, as the network
would be given them, without their phase and without their names. The server passes them on in memory; what is not exactly
amplitudes is refused: by the server, or by the site that receives it where it is sealed.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from feddp import protocol
from feddp.protocol import Sent
from feddp.stages import exchange, initial
from feddp.stages.host import Host
from feddp.stages.message import Message
from feddp.stages.server import Server
from feddp.stages.site import Site
from feddp.stages.tensors import AMPLITUDE, Expected
from feddp.training.seeds import seed_of
from feddp.training.spectra import SLOT, windows
from feddp.training.store import Tensors, by_site


def serve(server: Server) -> None:
    initial.hand_over(server)
    exchange.prepare(server, protocol.INTRODUCE_SPECTRA)
    given = exchange.collect(server, protocol.COLLECT_SPECTRA)
    server.memory.styles = exchange.hand_out(server, protocol.TAKE_SPECTRA, given, ())


def answer(task: str, message: Message, host: Host) -> Message:
    site = host.open()
    if task == protocol.COLLECT_SPECTRA:
        return Message(given(site))
    keep(site, by_site(message.tensors))
    return Message()


def given(site: Site) -> Tensors:
    """AMPLITUDE: (N, channels, 2b+1, 2b+1) of N training images, drawn at the site. To be given with consent only.

    Every job is given the same images at a real site: job after job would otherwise collect them all.
    """
    rng = torch.Generator().manual_seed(seed_of(*site.standing_seed(SLOT)))
    drawn = torch.randperm(len(site.samples), generator=rng)[: site.plan.hyper.spectra].tolist()
    return {AMPLITUDE: windows(torch.stack([site.samples[i]["image"] for i in drawn]))}


def keep(site: Site, peers: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Puts the peers' amplitudes among the site's files until its evaluation; none where there is no peer.

    Raises:
        ContributionError: a peer's tensors are not exactly amplitudes; nothing is kept.
    """
    expected = Expected(site.plan)
    for peer, tensors in peers.items():
        expected.check(Sent.AMPLITUDES, peer, tensors)
    site.store.remove(SLOT)
    if peers:
        site.store.write(SLOT, {peer: tensors[AMPLITUDE] for peer, tensors in peers.items()})
