"""Adaptation at an unseen site (IOP-FL; Jiang et al., TMI 2023, section III-C): the site receives the donors' models.

The server relays the models in memory and writes none of them to disk. Where there are certificates, the donors seal the models
for the unseen site. The unseen site answers with numbers only; its images and masks do not leave it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from feddp import protocol
from feddp.adaptation.choices import GLOBAL, AdaptationOptions
from feddp.adaptation.models import REQUIRED, Models, completed
from feddp.adaptation.request import AdaptationRequest
from feddp.adaptation.unseen_site import adapt, fitting
from feddp.errors import ContributionError, InputError, PolicyError, Stopped
from feddp.networks.metadata import ZSCORE
from feddp.networks.weights import read_network
from feddp.partition import Tensors
from feddp.plan.resolve import build_network, require_initial
from feddp.protocol import ROUNDED, STD_WITHHELD, WITHHELD, Sent
from feddp.sealing.peers import whole
from feddp.stages import exchange
from feddp.stages.evaluate import is_whole
from feddp.stages.host import Host
from feddp.stages.message import Message
from feddp.stages.server import Server
from feddp.stages.site import last_network
from feddp.training.columns import METRICS, columns
from feddp.training.device import usable
from feddp.training.metrics import require_finite_of
from feddp.training.seeds import seed_of
from feddp.training.store import by_site, together

MASKS = "masks"
NUMBERS = ("images", "empty_masks", "seconds")
NO_RECIPIENT = "its policy does not name the unseen site among its recipients"
FIT = ("loss_before", "loss", "epoch")  # of the strategies that train

# --- at the server -------------------------------------------------------------------------------------------------------


def serve(server: Server) -> None:
    """Asks the unseen site for its consent and the donors for their models, then relays the models."""
    request, memory = _request(server.memory.request), server.memory
    newcomer = request.newcomer
    shared = memory.brought() or {}
    memory.expected.check(Sent.SHARED, "the job", shared)
    _join(server, newcomer)
    answers, donors, without = _collect(server, request)
    message = Message(exchange.of_peers(donors, answers) | together({GLOBAL: shared}))
    answer = server.ask(protocol.ADAPT, {newcomer: message}, NUMBERS, partial(_check, server.plan.classes))[newcomer]
    names = (*NUMBERS, *FIT, "scores", WITHHELD, STD_WITHHELD)
    numbers = {name: answer.scalars[name] for name in names if name in answer.scalars}
    who = {"newcomer": newcomer, "donors": donors, "without": without}
    real = server.sealed  # sites with certificates have a guard, and guards round
    memory.write_results({"run": request.job, **who, "sealed": real, ROUNDED: real, **numbers})
    server.progress("done")


def _request(request: AdaptationRequest | None) -> AdaptationRequest:
    if request is None:
        raise InputError("the job adapts no model; export it with `feddp job-outside`")
    return request


def _join(server: Server, newcomer: str) -> None:
    """Asks the unseen site for its consent; donors are asked only after that."""
    if newcomer not in server.sites():
        raise InputError(f"the unseen site {newcomer} is not among the job's sites; start its client, and submit again")
    answers = exchange.introduce(server, protocol.JOIN, [newcomer])
    if not answers[newcomer].scalars["consent"]:
        raise PolicyError(
            f"the unseen site {newcomer} does not consent: it was sent nothing;"
            " its privacy.json must have 'outside' in `consent`"
        )


def _collect(server: Server, request: AdaptationRequest) -> tuple[dict[str, Message], list[str], dict[str, str]]:
    """Returns all donors' answers, the donors whose models the unseen site receives, and the reason for each other one."""
    here = [site for site in request.donors if site in server.sites()]
    answers = exchange.collect(server, protocol.GIVE_MODEL, here) if here else {}
    given = exchange.peers_of(server, answers, [request.newcomer])[request.newcomer]
    without = dict.fromkeys(request.donors, "not among the job's sites") | dict.fromkeys(
        here, "refused; progress.jsonl says why"
    )
    without |= {site: NO_RECIPIENT if said.scalars["consent"] else exchange.NO_CONSENT for site, said in answers.items()}
    without = {site: reason for site, reason in without.items() if site not in given}
    if not given:
        reasons = "; ".join(f"{site}: {reason}" for site, reason in without.items())
        raise ContributionError(f"no donor gave a model ({reasons}); a donor's privacy.json must have 'outside' in `consent`")
    return answers, given, without


def _check(classes: Sequence[str], site: str, answer: Message) -> None:
    fit = [answer.scalars[name] for name in FIT if name in answer.scalars]
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in fit):
        raise ContributionError(f"site {site}: its losses or its epoch are not finite numbers")
    if "scores" in answer.scalars and not is_whole(answer.scalars["scores"], columns(METRICS, classes), answer.scalars):
        raise ContributionError(f"site {site}: its scores lack a metric, or hold one that is not a finite number")


# --- at a site -----------------------------------------------------------------------------------------------------------


def answer(task: str, message: Message, host: Host) -> Message:
    request = _request(host.request)
    if task == protocol.JOIN:  # a folder that does not fit fails here, before a donor sends its network
        fitting(host.data, host.plan, request.score)
        return Message()
    if task == protocol.GIVE_MODEL:
        return Message(_own_network(host, request.job))
    if not host.consents(protocol.OUTSIDE):
        raise PolicyError(f"site {host.name} does not consent to 'outside', yet it was sent models")
    return Message(scalars=_adapt(host, request, message.tensors))


def _own_network(host: Host, job: str) -> Tensors:
    """Returns the network with which this site ended the earlier job."""
    file = last_network(host.files(job))
    if file is None:
        raise InputError(f"site {host.name}: job {job} left no network here; correct the job's id, or leave this donor out")
    state, metadata = read_network(file)
    wanted, metadata = host.plan.metadata, {"normalise": ZSCORE} | metadata  # a file of an earlier version lacks it
    if wrong := [f"{n}={metadata.get(n)}, not {wanted[n]}" for n in (*REQUIRED, "normalise") if metadata.get(n) != wanted[n]]:
        raise InputError(f"site {host.name}: {file} is another network than this job's: {'; '.join(wrong)}")
    return state


def _adapt(host: Host, request: AdaptationRequest, tensors: Mapping[str, Tensor]) -> Mapping[str, Any]:
    """Writes the masks to this site's disk and returns the numbers that leave."""
    where = usable(host.device, f"site {host.name}: device", "correct it in the site's policy")
    personal = by_site(tensors)
    shared = personal.pop(GLOBAL, {})
    require_initial(host.plan, f"site {host.name} was sent as the global model", shared)
    if not personal:
        raise PolicyError(f"site {host.name}: no donor's network is left; `senders` in its privacy.json must name a donor")
    own, left_out = _seeded(request.request, host.secret), partial(host.left_out, protocol.ADAPT)
    # the server cannot check sealed models, so the site checks them
    personal = whole(personal, partial(host.expected.check, Sent.MODEL), left_out)
    personal = whole(personal, _trial(host, own, where), left_out)
    models = Models.of(personal, completed(shared, personal), host.plan.metadata)

    def report(epoch: int, loss: float) -> None:
        host.store.record(protocol.ADAPT, epoch=epoch, of=own.settings.epochs, loss=loss)
        if host.stopped():
            raise Stopped("the job was aborted")

    done = adapt(models, request.job, host.data, host.store.folder / MASKS, own, where, report)
    numbers = {name: done[name] for name in ("images", "empty_masks")} | {"seconds": done["seconds_per_image"]}
    if losses := done["losses"]:
        numbers |= {"loss_before": losses[0], "loss": losses[done["kept_epoch"]], "epoch": done["kept_epoch"]}
    return numbers | ({"scores": done["scores"]} if own.score else {})


def _trial(host: Host, request: AdaptationOptions, where: torch.device) -> Callable[[str, Tensors], None]:
    """Returns a check of a donor's network: it raises ContributionError if a map of the first batch of images is not finite."""
    source, network = fitting(host.data, host.plan, request.score), build_network(host.plan).to(where).eval()
    first = replace(source, files=source.files[: request.settings.batch])
    images = torch.stack(first.read(host.plan.channels, host.plan.size, host.plan.training.normalise)[0]).to(where)

    @torch.no_grad()
    def check(donor: str, state: Tensors) -> None:
        network.load_state_dict(state)
        require_finite_of(donor, network(images))

    return check


def _seeded(request: AdaptationOptions, secret: str) -> AdaptationOptions:
    """Returns the request; its seed also depends on the site's secret, if the site has one."""
    settings = request.settings
    seed = seed_of(secret, settings.seed) if secret else settings.seed
    return replace(request, settings=replace(settings, seed=seed))
