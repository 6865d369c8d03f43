"""The server's running jobs learn the new token of a client that registers again (`feddp.flare.unfinished`)."""

from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import RunProcessKey
from nvflare.apis.fl_context import FLContext


class NewTokens(FLComponent):
    """For the server's resources.json: when a client registers again, it takes part in its running jobs again.

    FLARE knows the clients of a job by the tokens that they had at its start. A job's process asks for them (`controller`).
    Only the holder of the client's certificate can register; FLARE has checked it before this event.
    """

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type != EventType.CLIENT_REGISTER_PROCESSED:
            return
        engine = fl_ctx.get_engine()
        present = {client.name: client for client in engine.get_clients()}
        for process in list(engine.run_processes.values()):
            there: dict[str, Any] = process.get(RunProcessKey.PARTICIPANTS) or {}
            now = [present.get(client.name, client) for client in there.values()]
            # replaced as a whole: other threads of FLARE's walk through the old one
            process[RunProcessKey.PARTICIPANTS] = {client.token: client for client in now}
