"""What a site stops goes to its own audit file: FLARE's, which its administrator reads."""

from nvflare.apis.fl_context import FLContext
from nvflare.apis.utils.fl_context_utils import add_job_audit_event


def audit(fl_ctx: FLContext, what: str) -> str:
    """Adds one line, to which FLARE adds scope, job and task; returns it. The simulator has no auditor, and writes nothing.

    Names of tensors and settings are the job's words: they make no line of their own, and none without end.
    """
    line = " ".join(what.split())[:500]
    add_job_audit_event(fl_ctx, msg=f"[{line}]")
    return line
