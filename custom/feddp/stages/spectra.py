"""FedDG's exchange before stage 1 (Liu et al., CVPR 2021): consenting sites exchange mean amplitude spectra, once.

No image leaves a site, nor the spectrum of one: that of a single image would be recognised by anybody who has the image. A site
sends the low-frequency centres of at most `spectra` mean amplitude spectra, each over a group of at least `min_images` patients
(its policy), rounded, without phase and without names. The server relays them in memory. Whoever can read them, the server
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
from feddp.training.seeds import generator
from feddp.training.spectra import SLOT, group_means, of_patients
from feddp.training.store import by_site


def serve(server: Server) -> None:
    initial.hand_over(server)
    exchange.prepare(server, protocol.INTRODUCE_SPECTRA)
    given = exchange.collect(server, protocol.COLLECT_SPECTRA)
    server.memory.styles = exchange.hand_out(server, protocol.TAKE_SPECTRA, given, ())


def answer(task: str, message: Message, host: Host) -> Message:
    site = host.open()
    if task == protocol.COLLECT_SPECTRA:
        found = given(site, host.min_images)
        if not found:
            host.withheld(task, f"there are too few patients for a mean spectrum over min_images={host.min_images} of them")
            return Message(scalars={"consent": False, protocol.TOO_FEW: True})
        return Message(found)
    keep(site, by_site(message.tensors), partial(host.left_out, task))
    return Message()


def given(site: Site, least: int) -> Tensors:
    """Returns AMPLITUDE: (N, channels, 2b+1, 2b+1), the mean spectra of N groups of at least `least` patients; {} if the site
    has fewer. It leaves only with consent.

    A real site makes the same groups for every job, from the split `train`, whatever the job asks for; one that asks for fewer
    gets the first ones. Otherwise two jobs could get groups that differ by one patient, whose spectrum is their difference.
    """
    train = {row.image for row in site.folder.rows_of("train")}
    patients = of_patients(sample for sample in site.samples if sample["stem"] in train)
    order = torch.randperm(len(patients), generator=generator(*site.standing_seed(SLOT))).tolist()
    means = group_means(patients, least, order)[: site.plan.hyper.spectra]
    return {AMPLITUDE: means} if len(means) else {}


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
