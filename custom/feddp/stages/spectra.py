"""FedDG's exchange before stage 1 (Liu et al., CVPR 2021): consenting sites exchange amplitude spectra, once.

No image leaves a site. A site sends the low-frequency centre of the amplitude spectra of at most `spectra` training images, as
the network receives them, without phase and without names. The server relays them in memory. Whoever can read them, the server
or, if they are sealed, the receiving site, refuses anything else.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from feddp import protocol
from feddp.partition import Tensors
from feddp.protocol import Sent
from feddp.sealing.peers import LeftOut, unnoted, whole
from feddp.stages import exchange, initial
from feddp.stages.host import Host
from feddp.stages.message import Message
from feddp.stages.server import Server
from feddp.stages.site import Site
from feddp.stages.tensors import AMPLITUDE
from feddp.training.seeds import seed_of
from feddp.training.spectra import SLOT, windows
from feddp.training.store import by_site


def serve(server: Server) -> None:
    initial.hand_over(server)
    exchange.prepare(server, protocol.INTRODUCE_SPECTRA)
    given = exchange.collect(server, protocol.COLLECT_SPECTRA)
    server.memory.styles = exchange.hand_out(server, protocol.TAKE_SPECTRA, given, ())


def answer(task: str, message: Message, host: Host) -> Message:
    site = host.open()
    if task == protocol.COLLECT_SPECTRA:
        return Message(given(site))
    keep(site, by_site(message.tensors), partial(host.left_out, task))
    return Message()


def given(site: Site) -> Tensors:
    """Returns AMPLITUDE: (N, channels, 2b+1, 2b+1) of N training images drawn at the site. It leaves only with consent.

    A real site draws the same images in every job; otherwise a series of jobs could collect the spectra of all images.
    """
    rng = torch.Generator().manual_seed(seed_of(*site.standing_seed(SLOT)))
    drawn = torch.randperm(len(site.samples), generator=rng)[: site.plan.hyper.spectra].tolist()
    return {AMPLITUDE: windows(torch.stack([site.samples[i]["image"] for i in drawn]).cpu())}


def keep(site: Site, peers: Mapping[str, Mapping[str, Tensor]], left_out: LeftOut = unnoted) -> None:
    """Stores the peers' amplitudes in the site's folder until the evaluation. A peer whose tensors are not exactly amplitudes
    is left out.

    Raises:
        ContributionError: this is so of every peer; nothing is stored.
    """
    peers = whole(peers, partial(site.expected.check, Sent.AMPLITUDES), left_out)
    site.store.remove(SLOT)
    if peers:
        site.store.write(SLOT, {peer: tensors[AMPLITUDE] for peer, tensors in peers.items()})
