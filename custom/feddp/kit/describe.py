"""What a job will do at one hospital, in words for its administrator."""

from collections.abc import Iterator
from pathlib import Path

from torch import nn

from feddp.adaptation.request import AdaptationRequest
from feddp.data.folder import SiteFolder
from feddp.flare.job_folder import Job
from feddp.flare.policy import SitePolicy
from feddp.methods.aggregation import Spec
from feddp.methods.base import CALIBRATE, HEADS, SPECTRA
from feddp.partition import Partition, select
from feddp.plan.resolve import build_network, exchanged, head_names, partition_of
from feddp.plan.schema import Plan
from feddp.protocol import OUTSIDE, consents_of

# what a setting that differs from its default means for privacy; of any other nothing is known to hang on it
PRIVACY = {
    "lr": "a larger step writes more of a batch into what leaves",
    "heads_lr": "a larger step writes more of a batch into the heads that peers receive",
    "batch": "the fewer images in a step, the more of each shows in what leaves",
    "local_epochs": "the more epochs before a round ends, the less a single image shows in it",
    "clip": "a wider clip lets one image weigh more",
    "weight_decay": "a strong decay wipes out what earlier steps left, and so lets a single step show",
    "loss": "another loss was not looked at as the default was",
    "augment": "without it the network sees the images as they are",
    "selection": "with test, the test images choose the round, and say more of themselves",
    "min_sites": "with fewer sites in a mean each one's contribution shows more",
    "private": "what is not named here is sent to the server every round",
    "precision": "coarser numbers leave, of the same tensors",
    "spectra": "of so many training images the centre of the amplitude spectrum goes to the peers",
    "start": "which round is kept; no more leaves",
    "rounds": "every round leaves one more contribution",
}


def described(name: str, job: Job, policy: SitePolicy, data: Path | None) -> list[str]:
    """Lines; `data` is the site's folder, where this machine can see it."""
    plan = job.plan
    lines = [
        f"job {name}, plan {plan.digest(job.asked)}",
        f"method {plan.method}, network {plan.network}, images of {plan.channels} channels at {plan.size} x {plan.size}",
        f"classes {', '.join(plan.classes)} ({plan.labels}); seed {plan.seed}",
    ]
    lines += _outside(job, job.request, policy) if job.request else _rounds(plan, policy, data)
    lines += [_tensors(job), *_settings(plan)]
    return lines


def _outside(job: Job, request: AdaptationRequest, policy: SitePolicy) -> list[str]:
    changed = ", ".join(f"{name}={value}" for name, value in request.settings.items()) or "none"
    return [
        f"no training: {', '.join(request.donors)} give their whole networks of job {request.job} to {request.newcomer}",
        f"{request.newcomer} adapts them to its images ({request.how}), and sends counts and losses"
        + (", and the mean metrics of its masks" if request.score else ""),
        f"settings of the adaptation that differ from the defaults: {changed}",
        _consent(OUTSIDE, policy),
    ]


def _rounds(plan: Plan, policy: SitePolicy, data: Path | None) -> list[str]:
    network = build_network(plan)
    partition = partition_of(plan, network)
    shared = Spec.of(network.state_dict(), partition.shared)
    spec = shared.halved if plan.federation.half else shared
    training = plan.training
    names = f"{len(partition.shared)} tensors, {spec.nbytes:,} bytes" + (" (in half precision)" if plan.federation.half else "")
    images = len(SiteFolder.open(data).rows_of("train")) if data else None
    steps = f", {-(-images // training.batch)} an epoch over the {images} training images here" if images else ""
    phases = f" in {plan.phases} phases" if plan.phases > 1 else ""
    return [
        f"sites: {', '.join(plan.sites)}; a round counts with {plan.federation.min_sites}",
        f"leaves this site in each of {plan.rounds} rounds{phases}, to the server: {names}, and means of losses and metrics",
        f"not sent to the server: {len(partition.private)} tensors of this network ({', '.join(partition.private[:2])}, ...)"
        if partition.private
        else "not sent to the server: no tensor; the whole network is shared",
        f"each round: {training.local_epochs} epochs in steps of {training.batch} images{steps}; learning rate {training.lr}",
        f"stages: {', '.join(plan.stages)}",
        *([_consent(word, policy) for word in consents_of(plan.stages)] or ["consent: this job asks for none"]),
        *(f"  with consent, sealed, to the other sites: {what}" for what in _exchanged(plan, network, partition)),
        *_kept(policy, network, partition),
    ]


def _exchanged(plan: Plan, network: nn.Module, partition: Partition) -> Iterator[str]:
    """What leaves a consenting site beside the rounds."""
    if SPECTRA in plan.stages:
        yield f"once, the centres of the amplitude spectra of {plan.hyper.spectra} training images"
    if HEADS in plan.stages:
        yield f"in each of {plan.heads.heads_epochs} epochs, {len(head_names(network))} tensors of the head"
    if CALIBRATE in plan.stages and plan.calibration.lambda_ > 0 and (names := exchanged(plan, partition)):
        size = Spec.of(network.state_dict(), names).nbytes
        yield f"once, {len(names)} tensors, {size:,} bytes, with which they have this site's whole network"


def _kept(policy: SitePolicy, network: nn.Module, partition: Partition) -> Iterator[str]:
    """Where the hospital's own `private` stands against the job."""
    for role in policy.private:
        names = select(network, role)
        if not names:
            yield f"note: `private` of privacy.json names {role}, of which this network has none: this site refuses the job"
        elif shared := names & set(partition.shared):
            what = f"the job shares {len(shared)} {role} tensors, which `private` of privacy.json keeps"
            yield f"note: {what}: the guard stops them"


def _consent(word: str, policy: SitePolicy) -> str:
    gives = "gives" if policy.consents(word) else "does not give: this site takes no part in that exchange"
    whom = "every consenting site" if policy.recipients is None else ", ".join(policy.recipients) or "nobody"
    return f"consent to {word}: asked for; this kit {gives}" + (f", to {whom}" if policy.consents(word) else "")


def _tensors(job: Job) -> str:
    if not job.plan.weights:
        return "initial tensors: none; the network starts from the plan's seed"
    what = "brought by the job" + (" as the finished run's, which nobody has checked" if job.request else "")
    return f"initial tensors: {what}, SHA-256 {job.plan.weights}"


def _settings(plan: Plan) -> list[str]:
    known, meanings = Plan.known_settings(plan.method), Plan.meanings(plan.method)
    changed = [
        f"  {name}={value} (default {known[name]}): {meanings[name]}; "
        + (f"privacy: {PRIVACY[name]}" if name in PRIVACY else "nothing more leaves by it")
        for name, value in plan.settings.items()
    ]
    return ["settings that differ from the defaults:", *changed] if changed else ["settings: all as the method's defaults"]
