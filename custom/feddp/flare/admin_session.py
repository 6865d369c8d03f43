"""FLARE's admin session as we open it: how long it waits for an answer, its errors as ours, and which jobs have ended."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

from feddp.errors import FedDPError
from feddp.flare.dead_connections import close_dead_connections

CONNECT = 20.0  # seconds to log in
# seconds for a server to answer a command: FLARE's own 5 are too few for one that shares its processor with sites at work, and
# a single late answer ends what waits for the job
ANSWER = 30.0


def opened_session(person: str, kit: Path, connect: float = CONNECT) -> Session:
    """Returns a session of the person whose kit it is.

    Args:
        connect: seconds to log in.

    Raises:
        Exception: one of FLARE's many types; see `session_errors`.
    """
    close_dead_connections()  # `feddp watch` waits for hours
    session: Session = new_secure_session(person, str(kit.resolve()), timeout=connect)
    session.set_timeout(ANSWER)
    return session


def is_final(status: str) -> bool:
    """Returns whether the status of a job is a final one."""
    return status.startswith("FINISHED")


@contextmanager
def session_errors(what: str, remedy: str) -> Iterator[None]:
    """Turns an exception of any other type, of which FLARE's session raises many, some of them for half an answer, into a
    FedDPError: `what` failed, the exception, the remedy."""
    try:
        yield
    except FedDPError:
        raise
    except Exception as error:
        raise FedDPError(f"{what} ({type(error).__name__}: {error}); {remedy}") from error
