"""Describes in words what a job will do at one hospital, for its administrator."""

from collections.abc import Iterator
from pathlib import Path

from torch import nn

from feddp.adaptation.request import AdaptationRequest
from feddp.data.folder import SiteFolder
from feddp.data.loading import steps_in_an_epoch
from feddp.flare.bounds import LEAST_SITES
from feddp.flare.job_folder import Job
from feddp.flare.numbers import selected_by
from feddp.flare.policy import SitePolicy
from feddp.methods.aggregation import Spec
from feddp.methods.base import CALIBRATE, HEADS, SPECTRA
from feddp.partition import Partition, select
from feddp.plan.resolve import build_network, exchanged, head_names, partition_of
from feddp.plan.schema import Plan
from feddp.protocol import OUTSIDE, consents_of
from feddp.reading import counted

# the meaning for privacy of a setting that differs from its default; the others have no known effect
PRIVACY = {
    "lr": "with a larger step, the tensors that leave reveal more about a batch",
    "heads_lr": "with a larger step, the heads that peers receive reveal more about a batch",
    "batch": "with fewer images per step, the tensors that leave reveal more about each image",
    "local_epochs": "with more epochs per round, the tensors that leave reveal less about each image",
    "clip": "a larger clip gives one image more influence",
    "weight_decay": "a strong decay erases earlier steps, so a single step becomes visible",
    "loss": "only the default loss was examined",
    "augment": "without augmentation, the network sees the original images",
    "normalise": "with scale, the spectra that FedDG's peers receive hold the mean brightness of the images",
    "selection": "with test, validation images are trained on too; test images select the round, which reveals more about them",
    "min_sites": "with fewer sites in a mean, each contribution has more weight",
    "aggregation": "with median or trimmed, a number of γ may be that of one site alone, and every site receives it",
    "movement": "a larger one lets whoever chooses γ read more of the images",
    "statistics": "a larger one lets whoever chooses γ read more of the images",
    "pfedme_beta": "above 1, the server goes beyond the sites' mean, as with a larger movement",
    "norm_factor": "a round in which the server refuses sites is a mean of fewer contributions",
    "private": "every tensor not named here is sent to the server in every round",
    "precision": "the same tensors leave with fewer digits",
    "spectra": "the peers receive that many mean amplitude spectra, each over min_images patients or more",
    "start": "selects the round that is kept; nothing more leaves",
    "rounds": "every round sends one more contribution",
}


def described(name: str, job: Job, policy: SitePolicy, data: Path | None) -> list[str]:
    """Returns the lines of the description; `data` is the site's folder, if it is on this machine."""
    plan = job.plan
    lines = [
        f"job {name}, plan {plan.digest(job.asked)}",
        f"method {plan.method}, network {plan.network}, images of {plan.channels} channels at {plan.size} x {plan.size}",
        f"classes {', '.join(plan.classes)} ({plan.labels}); seed {plan.seed}",
    ]
    if job.resume:
        lines.append(f"continues run {job.resume} after its last completed round, with the files that it left here")
    lines += _outside(job, job.request, policy) if job.request else _rounds(plan, policy, data)
    lines.append(_tensors(job))
    return lines if job.request else [*lines, *_settings(plan)]


def _outside(job: Job, request: AdaptationRequest, policy: SitePolicy) -> list[str]:
    changed = ", ".join(f"{name}={value}" for name, value in request.settings.items()) or "none"
    return [
        f"no training: {', '.join(request.donors)} give their whole networks of job {request.job} to {request.newcomer}",
        f"{request.newcomer} adapts them to its images ({request.how}) and sends counts and losses"
        + (", and the mean metrics of its masks, of each class too" if request.score else ""),
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
    images = len(SiteFolder.open(data).rows_of(*training.trained_on)) if data else None
    made = counted(steps_in_an_epoch(images, training.batch), "step") if images else ""
    steps = f", {made} per epoch for the {images} training images here" if images else ""
    epochs = counted(training.local_epochs, "epoch")
    phases = f" in {plan.phases} phases" if plan.phases > 1 else ""
    return [
        f"sites: {', '.join(plan.sites)}; a round needs the answers of {plan.federation.min_sites}",
        f"sent to the server in every round ({plan.rounds} in all){phases}: {names}, and means of losses and metrics",
        f"not sent to the server: {len(partition.private)} tensors of this network ({', '.join(partition.private[:2])}, ...)"
        if partition.private
        else "not sent to the server: no tensor; the whole network is shared",
        f"each round: {epochs} in steps of {training.batch} images{steps}; learning rate {training.lr}",
        f"stages: {', '.join(plan.stages)}",
        *([_consent(word, policy) for word in consents_of(plan.stages)] or ["consent: this job needs none"]),
        *(f"  with consent, sealed, to the other sites: {what}" for what in _exchanged(plan, network, partition)),
        *_kept(policy, network, partition),
        *_unscored(plan, policy, data),
    ]


def _exchanged(plan: Plan, network: nn.Module, partition: Partition) -> Iterator[str]:
    """Yields what a consenting site gives to its peers, in addition to the rounds."""
    if SPECTRA in plan.stages:
        yield f"once, the centres of at most {plan.hyper.spectra} mean amplitude spectra, each of a group of patients"
    if HEADS in plan.stages:
        yield f"in every epoch ({plan.heads.heads_epochs} in all), {len(head_names(network))} tensors of the head"
    if CALIBRATE in plan.stages and plan.calibration.lambda_ > 0 and (names := exchanged(plan, partition)):
        size = Spec.of(network.state_dict(), names).nbytes
        yield f"once, {len(names)} tensors, {size:,} bytes, which complete this site's whole network"


def _unscored(plan: Plan, policy: SitePolicy, data: Path | None) -> Iterator[str]:
    """Yields what too few images to select rounds by mean for the job."""
    if data and (images := selected_by(plan, data)) < policy.min_images:
        least, split = policy.min_images, plan.training.selection
        yield f"note: {counted(images, 'image')} in {split} here, and min_images of privacy.json is {least}: no score leaves"
        if plan.needs_scores:
            yield "  this site has no part in the choice of the best round; if no site has enough, the job ends at its start"


def _kept(policy: SitePolicy, network: nn.Module, partition: Partition) -> Iterator[str]:
    """Yields conflicts between the hospital's `private` and the job."""
    for role in policy.private:
        if shared := select(network, role) & set(partition.shared):
            what = f"the job shares {len(shared)} {role} tensors, which `private` of privacy.json keeps at this site"
            yield f"note: {what}: the guard stops them"


def _consent(word: str, policy: SitePolicy) -> str:
    asked = f"consent to {word}: the job asks for it; this kit"
    if not policy.consents(word):
        return f"{asked} does not consent and takes no part in that exchange"
    whom = "every consenting site" if policy.recipients is None else ", ".join(policy.recipients) or "no site"
    whose = "" if policy.senders is None else f", and uses what {', '.join(policy.senders) or 'no site'} gives"
    return f"{asked} consents, for {whom}{whose}"


def _tensors(job: Job) -> str:
    if not job.plan.weights:
        return "initial tensors: none; the network starts from the plan's seed"
    what = "brought by the job" + (" as the finished run's, without a check" if job.request else "")
    return f"initial tensors: {what}, SHA-256 {job.plan.weights}"


def _settings(plan: Plan) -> list[str]:
    known, meanings = Plan.known_settings(plan.method), Plan.meanings(plan.method)
    changed = [
        f"  {name}={value} (default {known[name]}): {meanings[name]}; "
        + (f"privacy: {PRIVACY[name]}" if name in PRIVACY else "privacy: nothing more leaves")
        for name, value in plan.settings.items()
        if (name, value) != ("min_sites", min(LEAST_SITES, len(plan.sites)))  # which `feddp job` writes by itself
    ]
    return ["settings that differ from the defaults:", *changed] if changed else ["settings: all have the method's defaults"]
