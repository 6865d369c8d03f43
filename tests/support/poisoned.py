"""A server that receives one malicious site's training results as an attack changes them."""

from collections.abc import Callable

import torch
from torch import Tensor

from feddp import protocol
from feddp.partition import Tensors
from feddp.run.local import LocalServer
from feddp.stages.message import Message

Attack = Callable[[Tensor, Tensor, torch.Generator], Tensor]  # of γ, the site's γ_k and random numbers, for one tensor

ATTACKS: dict[str, Attack] = {
    "none": lambda shared, own, random: own,
    "times 1000": lambda shared, own, random: 1e3 * own,
    "sign flipped": lambda shared, own, random: -own,
    "noise": lambda shared, own, random: own + torch.randn(own.shape, generator=random),
    "change reversed, twice": lambda shared, own, random: shared - 2 * (own - shared),
}


class Poisoned(LocalServer):
    """The attack, one of ATTACKS, leaves integer counters as they are. It stays in the tensors' domains, which the server
    checks: a flipped variance is 0.

    Attributes:
        shared: γ as it was last sent for training.
    """

    malicious, attack = "", "none"
    shared: Tensors = {}

    def send(self, task, sites, data, received):
        random = torch.Generator().manual_seed(self.memory.round)  # its own: the honest sites' draws stay the same
        if task == protocol.TRAIN:
            self.shared = data.tensors

        def changed(site, reply):
            def answer():
                message = reply()
                if task != protocol.TRAIN or site != self.malicious:
                    return message
                floats = {n: v for n, v in message.tensors.items() if v.is_floating_point()}
                sent = {n: ATTACKS[self.attack](self.shared[n], v, random) for n, v in floats.items()}
                domains = self.memory.expected.domains
                sent = {n: v.clamp(domains[n].least, domains[n].most) for n, v in sent.items()}
                return Message({**message.tensors, **sent}, message.scalars)

            received(site, answer)

        return super().send(task, sites, data, changed)
