"""Commands of the admin console that no site answers, whoever asks."""

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import AdminCommandNames, FLContextKey
from nvflare.apis.fl_context import FLContext

CODE = "bring code of their own"
# what it lets a person do. A log's configuration names classes and functions that Python builds and calls, with any arguments
NEVER = {
    AdminCommandNames.CONFIGURE_JOB_LOG: CODE,
    AdminCommandNames.CONFIGURE_SITE_LOG: CODE,
    AdminCommandNames.CALL: "call into a site's components",
    AdminCommandNames.SHOW_ERRORS: "read a site's errors",
}


class RefuseCommands(FLComponent):
    """For a site's resources.json: refuses the commands of NEVER in the site's own process.

    authorization.json denies them too; but for some of them FLARE 2.9 asks the server's alone (`require_authz=False`).
    """

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        command = fl_ctx.get_prop(FLContextKey.COMMAND_NAME)
        if event_type == EventType.AUTHORIZE_COMMAND_CHECK and command in NEVER:
            fl_ctx.set_prop(FLContextKey.AUTHORIZATION_RESULT, False, sticky=False)
            fl_ctx.set_prop(FLContextKey.AUTHORIZATION_REASON, f"{command} is answered by no site", sticky=False)
