"""A site's part in `flare.outside`: a donor gives what an earlier job left here, the newcomer adapts what it is given."""

from dataclasses import replace
from typing import Any

import torch
from nvflare.apis.fl_context import FLContext
from nvflare.apis.signal import Signal

from feddp import protocol
from feddp.adaptation.adapt import read_settings
from feddp.adaptation.hospital import Request, adapt
from feddp.adaptation.models import FACTS, GLOBAL, Models, completed
from feddp.errors import InputError, PolicyError, Stopped
from feddp.flare import messages
from feddp.flare.executors import TaskExecutor
from feddp.flare.site import SiteComponent
from feddp.methods.aggregation import Spec
from feddp.methods.site import last_network
from feddp.networks.weights import read_network
from feddp.plan.resolve import require_initial
from feddp.training.device import usable
from feddp.training.seeds import seed_of
from feddp.training.store import Tensors, by_site, require_job_id

MASKS = "masks"


class OutsideExecutor(TaskExecutor):
    """Gives and takes models only where the site's policy consents.

    Args:
        job: the id of the finished job whose networks are given.
        how: the newcomer's way from the models to a network (`feddp.adaptation.strategies`).
        settings: of `feddp.adaptation.adapt.Settings`, those that differ from the defaults.
        score: whether the newcomer reads its own masks afterwards, and sends mean metrics.

    Raises:
        InputError: the id is no name of a folder, there is no such way, or a setting is unknown or out of range.
    """

    def __init__(self, job: str, how: str, settings: dict[str, Any], score: bool = False):
        super().__init__()
        require_job_id(job)
        self.job, self.request = job, Request(how, read_settings(settings), score)

    def respond(self, task, component, tensors, scalars, fl_ctx, abort_signal):
        component.enter(fl_ctx)
        consents = component.policy(fl_ctx).consents(protocol.OUTSIDE)
        if task == protocol.JOIN:
            return messages.pack(consent=consents)
        if task == protocol.GIVE_MODEL:
            return messages.pack(self._personal(component, fl_ctx) if consents else {}, consent=consents)
        if task == protocol.ADAPT:
            if not consents:
                raise PolicyError(f"site {fl_ctx.get_identity_name()} does not consent to 'outside', yet it was sent models")
            return messages.pack(**self._adapt(component, tensors, fl_ctx, abort_signal))
        return super().respond(task, component, tensors, scalars, fl_ctx, abort_signal)

    def _personal(self, component: SiteComponent, fl_ctx: FLContext) -> Tensors:
        """The network that this site ended the earlier job with."""
        site = fl_ctx.get_identity_name()
        file = last_network(component.files(fl_ctx, self.job))
        if file is None:
            raise InputError(f"site {site}: job {self.job} left no network here; correct the job's id, or leave this donor out")
        state, said = read_network(file)
        wanted = component.plan.facts
        if wrong := [f"{name}={said.get(name)}, not {wanted[name]}" for name in FACTS if said.get(name) != wanted[name]]:
            raise InputError(f"site {site}: {file} is another network than this job's: {'; '.join(wrong)}")
        return state

    def _own(self, secret: str) -> Request:
        """The job's request, with a seed that comes from this site's secret too, where it has one."""
        settings = self.request.settings
        seed = seed_of(secret, settings.seed) if secret else settings.seed
        return replace(self.request, settings=replace(settings, seed=seed))

    def _adapt(self, component: SiteComponent, tensors: Tensors, fl_ctx: FLContext, abort_signal: Signal) -> dict[str, Any]:
        """Masks on this site's disk; the numbers that leave."""
        policy, store = component.policy(fl_ctx), component.store(fl_ctx)
        torch.set_num_threads(policy.threads)
        where = usable(policy.device, f"site {fl_ctx.get_identity_name()}: device", "correct it in the site's policy")
        personal = by_site(tensors)
        shared = personal.pop(GLOBAL, {})
        require_initial(component.plan, f"site {fl_ctx.get_identity_name()} was sent as the global model", shared)
        state = component.network.state_dict()
        for donor, given in personal.items():  # the server could not look into what came sealed
            Spec.of(state, tuple(state)).check(donor, given)
        models = Models.of(personal, completed(shared, personal), component.plan.facts)

        def report(epoch: int, loss: float) -> None:
            store.record(protocol.ADAPT, epoch=epoch, of=self.request.settings.epochs, loss=loss)
            if abort_signal.triggered:
                raise Stopped("the job was aborted")

        done = adapt(models, self.job, policy.data, store.folder / MASKS, self._own(component.secret(fl_ctx)), where, report)
        numbers = {name: done[name] for name in ("images", "empty_masks")} | {"seconds": done["seconds_per_image"]}
        if losses := done["losses"]:
            numbers |= {"loss_before": losses[0], "loss": losses[done["kept_epoch"]], "epoch": done["kept_epoch"]}
        return numbers | ({"scores": done["scores"]} if self.request.score else {})
