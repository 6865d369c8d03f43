"""The server's jobs and the clients that come and go: a new token is learnt, and a job that is done waits for nobody long."""

from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import RunProcessKey
from nvflare.apis.fl_context import FLContext

OUTCOME = 30.0  # seconds for which the server waits, after a job's end, for each client to say how its part ended


class Participants(FLComponent):
    """For the server's resources.json: a client that registers again (`unfinished`) takes part in its running jobs again.

    FLARE knows the clients of a job by the tokens that they had at its start. A job's process asks for them (`controller`).
    Only the holder of the client's certificate can register; FLARE has checked it before this event.

    A job whose results are complete stays RUNNING in FLARE until every client has reported, for 900 s if one is gone.
    """

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        engine = fl_ctx.get_engine()
        if event_type == EventType.SYSTEM_START:
            engine.job_runner.client_outcome_wait_timeout = OUTCOME
        elif event_type == EventType.CLIENT_REGISTER_PROCESSED:
            self._learn(engine)

    @staticmethod
    def _learn(engine: Any) -> None:
        present = {client.name: client for client in engine.get_clients()}
        for process in list(engine.run_processes.values()):
            there: dict[str, Any] = process.get(RunProcessKey.PARTICIPANTS) or {}
            now = [present.get(client.name, client) for client in there.values()]
            # replaced as a whole: other threads of FLARE's walk through the old one
            process[RunProcessKey.PARTICIPANTS] = {client.token: client for client in now}
