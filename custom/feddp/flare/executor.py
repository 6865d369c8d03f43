"""A site's executor. It answers every task of a job, using the protocol's table and the stages."""

from functools import partial

from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from feddp import protocol
from feddp.errors import FedDPError, SharedError, Stopped, StorageError
from feddp.flare import messages
from feddp.flare.agreement import agreeing
from feddp.flare.audit import audit
from feddp.flare.messages import SHARED_REFUSED, STORAGE_FAILED
from feddp.flare.sealing import arriving, ends
from feddp.flare.site import SiteComponent, site_component
from feddp.protocol import Kind
from feddp.reading import one_line
from feddp.stages import answered
from feddp.stages.message import Message

CODE_OF = {StorageError: STORAGE_FAILED, SharedError: SHARED_REFUSED}  # for what the server may know of an error
UNKNOWN = ReturnCode.EXECUTION_EXCEPTION


class StageExecutor(Executor):
    """Answers tasks one at a time. It logs an error at the site and answers with a return code."""

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        component = site_component(fl_ctx)
        with component.one_at_a_time:
            try:
                return _answer(task_name, component, shareable, fl_ctx, abort_signal)
            except Stopped:
                return make_reply(ReturnCode.TASK_ABORTED)
            except Exception as error:  # of any type; its text may hold paths and names, so the server gets only a return code
                message = str(error) if isinstance(error, FedDPError) else f"{type(error).__name__}: {error}"
                self.log_exception(fl_ctx, f"task {task_name}: {message}", fire_event=False)
                try:
                    audit(fl_ctx, f"task failed: {message if isinstance(error, FedDPError) else type(error).__name__}")
                    component.store(fl_ctx).record("error", task=task_name, message=one_line(message))
                except (OSError, StorageError) as full:  # the log, which FLARE writes, still has both
                    self.log_error(fl_ctx, f"task {task_name}: its failure was not written down: {full}", fire_event=False)
                return make_reply(next((code for kind, code in CODE_OF.items() if isinstance(error, kind)), UNKNOWN))


def _answer(task: str, component: SiteComponent, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
    context, spec = component.context(fl_ctx), protocol.spec_of(task)
    context.stopped = lambda: abort_signal.triggered
    context.audit = partial(audit, fl_ctx)
    message = agreeing(context, partial(component.seals, fl_ctx), task, Message(*messages.unpack(shareable)))
    component.drop_keys(but=spec.consent)  # an exchange without its last delivery ends with the first task of something else
    tensors = arriving(context, partial(component.seals, fl_ctx), task, message)
    if ends(context, task, message):
        component.drop_keys()  # before what follows, which may take hours
    if spec.kind is Kind.ROUND:
        fl_ctx.set_prop(messages.RECEIVED, tensors, private=True, sticky=False)
    if spec.kind not in (Kind.READY, Kind.START):
        context.enter()
    answer = answered(task, Message(tensors, message.scalars), context)
    return messages.pack(answer.tensors, **answer.scalars)
