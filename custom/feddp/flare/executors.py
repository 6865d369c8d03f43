"""A site's executors: thin, over one shared `Site`."""

from typing import Any

from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from feddp import protocol
from feddp.errors import FedDPError, InputError, PolicyError, Stopped
from feddp.flare import messages
from feddp.flare.audit import audit
from feddp.flare.sealing import arriving
from feddp.flare.site import SiteComponent, site_component
from feddp.methods import spectra
from feddp.methods.site import Site
from feddp.training.store import Tensors, by_site


class TaskExecutor(Executor):
    """Answers its tasks, one at a time; what goes wrong is written down here and answered with a return code."""

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        component = site_component(fl_ctx)
        with component.one_at_a_time:
            return self._answer(task_name, component, shareable, fl_ctx, abort_signal)

    def _answer(
        self, task_name: str, component: SiteComponent, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        try:
            tensors, scalars = messages.unpack(shareable)
            tensors = arriving(component, task_name, tensors, scalars, fl_ctx)
            return self.respond(task_name, component, tensors, scalars, fl_ctx, abort_signal)
        except Stopped:
            return make_reply(ReturnCode.TASK_ABORTED)
        except Exception as error:  # whatever it is, its text may hold paths and names: the server sees a return code
            message = str(error) if isinstance(error, FedDPError) else f"{type(error).__name__}: {error}"
            component.store(fl_ctx).record("error", task=task_name, message=message)
            audit(fl_ctx, f"task failed: {message if isinstance(error, FedDPError) else type(error).__name__}")
            self.log_exception(fl_ctx, f"task {task_name}: {message}", fire_event=False)
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)

    def respond(
        self,
        task: str,
        component: SiteComponent,
        tensors: Tensors,
        scalars: dict[str, Any],
        fl_ctx: FLContext,
        abort_signal: Signal,
    ) -> Shareable:
        raise InputError(f"{type(self).__name__} does not answer {task}")


class SiteExecutor(TaskExecutor):
    """Answers its tasks through the site of this run."""

    def respond(self, task, component, tensors, scalars, fl_ctx, abort_signal):
        site = component.open(fl_ctx, abort_signal)
        return self.answer(task, site, component, tensors, scalars, fl_ctx)

    def answer(
        self,
        task: str,
        site: Site,
        component: SiteComponent,
        tensors: Tensors,
        scalars: dict[str, Any],
        fl_ctx: FLContext,
    ) -> Shareable:
        raise InputError(f"{type(self).__name__} does not answer {task}")


class SpectraExecutor(SiteExecutor):
    """Before stage 1: amplitude spectra are given and taken only by a site whose policy consents."""

    def answer(self, task, site, component, tensors, scalars, fl_ctx):
        consents = component.policy(fl_ctx).consents(protocol.SPECTRA)
        if task == protocol.INTRODUCE_SPECTRA:
            return messages.pack(consent=consents)
        if task == protocol.COLLECT_SPECTRA:
            return messages.pack(spectra.given(site) if consents else {}, consent=consents)
        if tensors and not consents:
            raise PolicyError(f"site {site.name} does not consent to the exchange of spectra, yet it was sent tensors")
        spectra.keep(site, by_site(tensors))
        return messages.pack(consent=consents)


class TrainExecutor(SiteExecutor):
    """Stage 1: the network to start from, a round of training, and the adoption of the round that the stage hands on."""

    def respond(self, task, component, tensors, scalars, fl_ctx, abort_signal):
        if task == protocol.INITIAL:
            component.keep_initial(tensors, fl_ctx)
            return messages.pack()
        return super().respond(task, component, tensors, scalars, fl_ctx, abort_signal)

    def answer(self, task, site, component, tensors, scalars, fl_ctx):
        if task not in (protocol.TRAIN, protocol.SCORE, protocol.ADOPT):
            return super().answer(task, site, component, tensors, scalars, fl_ctx)
        round, phase = scalars.get("round"), scalars.get("phase")  # whatever they are, the site says which it takes
        if task == protocol.TRAIN:
            fl_ctx.set_prop(messages.RECEIVED, tensors, private=True, sticky=False)
            mine, metrics = site.train(tensors, round, scalars.get("keep"), phase)
            return messages.pack(mine, round=round, phase=phase, **metrics)
        scores = {protocol.SCORE: site.score, protocol.ADOPT: site.adopt}[task](tensors, round)
        return messages.pack(**scores, round=round)


class CalibrationExecutor(SiteExecutor):
    """The stages at home. Personal tensors are given and taken only by a site whose policy consents."""

    def answer(self, task, site, component, tensors, scalars, fl_ctx):
        consents = component.policy(fl_ctx).consents(protocol.CALIBRATION)
        if task == protocol.INTRODUCE:
            return messages.pack(consent=consents)
        if task == protocol.COLLECT:
            return messages.pack(site.personal() if consents else {}, consent=consents)
        if task == protocol.COLLECT_HEADS:
            return messages.pack(site.head(scalars.get("epoch")) if consents else {}, consent=consents)
        if tensors and not consents:
            raise PolicyError(f"site {site.name} does not consent to the calibration exchange, yet it was sent tensors")
        if task == protocol.TUNE:
            tuned = site.tune()
        elif task == protocol.CALIBRATE:
            tuned = site.calibrate(by_site(tensors))
        elif task == protocol.CALIBRATE_HEADS:
            tuned = site.calibrate_heads(by_site(tensors), scalars.get("epoch"))
        else:
            return super().answer(task, site, component, tensors, scalars, fl_ctx)
        return messages.pack(loss=tuned.losses[-1], iou_before=tuned.scores[0], iou=tuned.scores[tuned.best], epoch=tuned.best)


class EvaluationExecutor(SiteExecutor):
    """Test metrics of the site's network, as means over its images."""

    def answer(self, task, site, component, tensors, scalars, fl_ctx):
        return messages.pack(**site.evaluate())
