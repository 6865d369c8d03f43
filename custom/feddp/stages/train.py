"""Stage 1: T rounds of partial-parameter aggregation (FedDP; Wang et al., TMI 2024, Algorithm 1, lines 3 to 12).

The server sends γ^t, every site trains v_k = γ^t ∪ ρ_k and sends γ_k, and γ^{t+1} is their mean, once in each of a round's
phases. Then every site keeps v̂_k = γ ∪ ρ_k of the last or the best round; the later stages start from it. Where nothing is
shared and the method says so (Local Train), the best round is each site's own.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from feddp import protocol
from feddp.errors import ContributionError, PolicyError
from feddp.methods.aggregation import combine
from feddp.methods.base import STAGES, TRAIN
from feddp.partition import Tensors
from feddp.plan.resolve import build_method
from feddp.reading import short
from feddp.stages import empty, initial, ready, selection
from feddp.stages.agreement import agreed, require_samples
from feddp.stages.host import Host
from feddp.stages.message import Message
from feddp.stages.movement import Reach, steps_at, steps_of
from feddp.stages.order import require, state_before
from feddp.stages.round import LocalRound, keep
from feddp.stages.server import Server
from feddp.stages.site import Scores, Site
from feddp.stages.spool import Spool
from feddp.stages.stopwatch import Stopwatch
from feddp.training.store import State

START = STAGES[TRAIN]
BEST_ROUND, BEST_IOU = "best/round", "best/iou"  # entries of a site's memory: its own best round

# --- at the server -------------------------------------------------------------------------------------------------------


def serve(server: Server) -> None:
    """Runs all rounds, then lets every site adopt the round from which the later stages start."""
    initial.hand_over(server)
    plan, memory = server.plan, server.memory
    shared = memory.latest()
    method = build_method(plan)
    first = memory.round
    for t in range(first, plan.rounds):
        if t > first:  # before it, all that are there have just been asked
            ready.meet(server)
        watch, slowest, absent, scored = Stopwatch(), 0.0, set[str](), dict[str, Message]()
        signed: Collection[str] | None = None  # the sites that have signed their notes in this round so far
        for phase in range(plan.phases):
            with Spool(memory.kept) as spool:
                answers, signed = _ask_to_train(server, shared, t, phase, spool, signed)
                if t > 0 and phase == 0:
                    scored = answers
                    empty.warn(server, answers)
                sent = {site: answer.tensors for site, answer in answers.items()}
                weights = method.weights(plan, {site: answer.scalars["samples"] for site, answer in answers.items()})
                with watch.part("combining"):
                    mean = combine(plan.federation.aggregation, sent, weights)
            before, after = (memory.expected.parameters(tensors) for tensors in (shared, mean))
            shared = mean | dict(method.aggregate(before, after, weights))
            slowest += max(answer.scalars["seconds"] for answer in answers.values())
            absent |= set(server.joined()) - answers.keys()
        if scored:  # after the last phase: in all of them the sites keep the state of the best round that the last save names
            note(server, t, scored)
        memory.note_missed(absent)
        with watch.part("saving"):
            server.save(shared, t + 1)
        seconds = watch.seconds
        parts = {"seconds": seconds, "beyond_compute": seconds - slowest, **watch.parts}
        server.progress("round", round=t + 1, of=plan.rounds, **parts)
    start = plan.rounds
    if plan.start == "last" or (plan.best_per_site and memory.best_round is None):  # each site knows its own best round
        note(server, start, _ask_to_score(server, protocol.ADOPT, shared, start))
    else:
        note(server, start, _ask_to_score(server, protocol.SCORE, shared, start))
        chosen, start = memory.load(memory.best)
        _ask_to_score(server, protocol.ADOPT, chosen, start)
    memory.start_round = start


def note(server: Server, round: int, answers: Mapping[str, Message]) -> None:
    """Compares `round`, the latest saved one, with the best one so far by the scores in the answers to it.

    Raises:
        ContributionError: every site withholds its score, and the plan starts later stages from the best round.
    """
    memory = server.memory
    # rounded here too: the simulator has no guard that rounds, and must give the same results
    ious = {site: protocol.rounded("iou", answer.scalars["iou"]) for site, answer in answers.items() if "iou" in answer.scalars}
    if not ious and server.plan.needs_scores:
        raise ContributionError(ready.NO_SCORE)
    best = selection.add(memory.scored, memory.best_round, round, ious)
    if best != memory.best_round:
        memory.best_round = best
        memory.keep_best()


def _ask_to_train(
    server: Server, shared: Tensors, t: int, phase: int, spool: Spool, signed: Collection[str] | None
) -> tuple[dict[str, Message], Collection[str] | None]:
    stated = server.memory.samples  # none if no site was asked, as by tests of this stage alone

    def check(site: str, answer: Message) -> None:
        _check_round(site, answer, t, phase)
        if answer.scalars["samples"] < 1:
            raise ContributionError(f"site {site}: its answer says {answer.scalars['samples']} training samples")
        if not stated:
            return
        require_samples(server, site, answer.scalars["samples"])
        reach = Reach(server.memory.expected, steps_at(server.plan, site, stated))
        if beyond := reach.beyond(shared, answer.tensors):
            raise ContributionError(
                f"site {site}: its contribution is not of this round's training: {beyond}. If every site's is refused so,"
                " submit a job with a larger `movement` or `statistics`"
            )

    best = server.memory.best_round
    scalars = {"round": t, "phase": phase, **_stated(server)} | ({} if best is None else {"keep": best})
    metadata: dict[str, Any] = {"round": t + 1, "phase": phase}
    more, signed = agreed(server, protocol.TRAIN, shared, metadata, t, phase, signed)
    message = Message(shared, scalars | more)
    scored = ("dice", "iou", protocol.EVALUATING) if t and not phase else ()
    numbers = ("loss", "samples", "seconds", protocol.LOADING, protocol.STORING, *scored)
    return server.ask(protocol.TRAIN, message, numbers, check, spool, among=signed, **metadata), signed


def _ask_to_score(server: Server, task: str, shared: Tensors, round: int) -> dict[str, Message]:
    def check(site: str, answer: Message) -> None:
        _check_round(site, answer, round)

    metadata: dict[str, Any] = {"round": round}
    more, signed = agreed(server, task, shared, metadata, round)
    message = Message(shared, metadata | _stated(server) | more)
    return server.ask(task, message, ("dice", "iou"), check, among=signed, **metadata)


def _stated(server: Server) -> dict[str, Any]:
    """Returns the sites' numbers of training images, by which movement is bounded; nothing if none was asked."""
    return {"samples": dict(server.memory.samples)} if server.memory.samples else {}


def _check_round(site: str, answer: Message, round: int, phase: int | None = None) -> None:
    """Checks round and, for training answers, phase."""
    said, wanted = (answer.scalars.get("round"), answer.scalars.get("phase")), (round, phase)
    if said != wanted:
        found, here = (f"round {r}" + (f", phase {p}" if phase else "") for r, p in (said, wanted))
        raise ContributionError(f"site {site}: its answer is for {found}, this is {here}")


# --- at a site -----------------------------------------------------------------------------------------------------------


def answer(task: str, message: Message, host: Host) -> Message:
    if task == protocol.AGREE:  # where there are certificates, the guard signs the note
        return Message()
    if task == protocol.INITIAL:
        initial.keep(host, message.tensors)
        return Message()
    watch = Stopwatch()
    with watch.part(protocol.LOADING):
        site = host.open()
    # the site reports which round and phase it answers
    said: dict[str, Any] = {name: message.scalars.get(name) for name in ("round", "phase", "keep")}
    round, phase, best = said.values()
    steps = _steps(host, message)
    if task == protocol.TRAIN:
        mine, metrics = train(site, message.tensors, round, best, phase, watch, steps)
        return Message(mine, {"round": round, "phase": phase, **metrics})
    scores = (adopt if task == protocol.ADOPT else score)(site, message.tensors, round, steps)
    return Message(scalars={**scores, "round": round})


def _steps(host: Host, message: Message) -> float:
    """Returns the steps of an epoch that bound how far γ may have moved, by the sites' numbers of images, or this one's."""
    samples: Any = message.scalars.get("samples", {host.name: host.samples})
    if not isinstance(samples, Mapping) or not samples:
        raise PolicyError(f"site {host.name}: it was sent no table of the sites' numbers of images")
    for site, count in samples.items():
        require(host.name, f"samples of {short(str(site))}", count, 1, protocol.LARGEST)
    return steps_of(host.plan, samples, host.samples)


def train(
    site: Site,
    shared: Mapping[str, Tensor],
    round: int,
    best: int | None = None,
    phase: int = 0,
    watch: Stopwatch | None = None,
    steps: float | None = None,
) -> tuple[Tensors, Scores]:
    """Runs one round or phase: scores, trains and stores v_k = γ^t ∪ ρ_k^t; returns γ_k and scalars.

    Args:
        shared: γ^t, exactly the shared tensors.
        round: t, from 0: the next round, a later one if the site missed some, or the last or the first one again.
        best: the best round so far; its state stays on disk.
        phase: from 0. Every phase ends with an aggregation; the received tensors are scored in the first phase.
        watch: runs since the site was asked, so that what it opened first counts; default: from now on.
        steps: of an epoch, which say how far γ^t may have moved (`feddp.stages.movement.steps_of`); None: it is not checked.

    Returns:
        The site's shared tensors after training, and its metrics: the loss; from the second round on Dice and IoU of
        v_k as it was received, and what `empty.note` tells of them; the number of training samples; the seconds it took, and of
        them those for loading (folder, network and images), for evaluation, and for the state on disk.

    Raises:
        PolicyError: the plan has no such round or phase, `best` was not scored, the site no longer has the state before
            the round, or γ^t is not what honest rounds give.
    """
    watch, plan = watch or Stopwatch(), site.plan
    require(site.name, "round", round, 0, plan.rounds - 1)
    require(site.name, "phase", phase, 0, plan.phases - 1)
    if best is not None:
        require(site.name, "keep", best, 1, round)
    step = round * plan.phases + phase
    with watch.part(protocol.STORING):
        state = state_before(site.name, site.store, step, f"round {round}", first=step == 0)
    with watch.part(protocol.LOADING):
        _ = site.samples
    received = site.received(shared, state)
    if steps is not None:
        site.require_near(shared, state, step, steps)
    scores: Scores = {}
    told: dict[str, bool] = {}
    if round and not phase:
        site.network.load_state_dict(state.personal or received)
        with watch.part(protocol.LOADING):
            _ = site.validation
        with watch.part(protocol.EVALUATING):
            scores = site.validate()
            told = empty.note(site, round, scores)
    site.network.load_state_dict(received)
    local = LocalRound(site, state, step, plan.training.lr, phase)
    loss = site.method.round(local)
    mine, _ = site.partition.split(site.network.state_dict())
    after = replace(local.state(), received=dict(shared))
    if plan.best_per_site and scores:
        own = own_best(state, round, scores)
        after, best = replace(after, memory=after.memory | own), int(own[BEST_ROUND])
    # a server that lost its latest file asks for the round before again
    starts = {first * plan.phases for first in (round, max(round - 1, 0), round if best is None else best)}
    with watch.part(protocol.STORING):
        keep(site, after, {step} | starts)
    metrics = {"loss": loss, **scores, "samples": float(len(site.samples)), "seconds": watch.seconds, **watch.parts}
    site.store.record("train", round=round, phase=phase, **metrics)
    return mine, {**metrics, **told}


def own_best(before: State, round: int, scores: Scores) -> Tensors:
    """Returns the entries of a site's memory for its best round so far by validation IoU; of equal rounds, the first.

    Args:
        before: the state that holds the best round before `round`, if there was one.
        scores: those of `round`.
    """
    iou = protocol.rounded("iou", scores["iou"])  # as the server sees it: its results name the round (`scored.best_rounds`)
    if BEST_IOU in before.memory and iou <= before.memory[BEST_IOU].item():
        return {name: before.memory[name] for name in (BEST_ROUND, BEST_IOU)}
    return {BEST_ROUND: torch.tensor(round), BEST_IOU: torch.tensor(iou, dtype=torch.float64)}


def score(site: Site, shared: Mapping[str, Tensor], round: int, steps: float | None = None) -> Scores:
    """Returns the validation scores of v̂_k = γ^r ∪ ρ_k^r, both of round r, or of the personal model if the method has one.

    Raises:
        PolicyError: the plan has no γ of such a round, or γ^r is not what honest rounds give.
    """
    require(site.name, "round", round, 0, site.plan.rounds)
    step = round * site.plan.phases
    state = site.store.load_state(step)
    received = site.received(shared, state)
    if steps is not None:
        site.require_near(shared, state, step, steps)
    site.network.load_state_dict(state.personal or received)
    scores = site.validate()
    site.store.record("score", round=round, **scores)
    return scores


def adopt(site: Site, shared: Mapping[str, Tensor], round: int, steps: float | None = None) -> Scores:
    """Saves v̂_k = γ^r ∪ ρ_k^r, both of round r, as the start of the later stages; returns its validation scores.

    If the plan says so, r is the site's own best round instead of `round`.
    """
    if site.plan.best_per_site:
        last = site.plan.rounds
        before = site.store.load_state(last * site.plan.phases)
        round = int(own_best(before, last, score(site, shared, last, steps))[BEST_ROUND])
    scores = score(site, shared, round, steps)
    site.save(START)
    return scores
