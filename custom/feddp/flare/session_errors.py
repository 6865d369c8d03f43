"""The errors of FLARE's admin session, which raises many types, some of them for half an answer, as ours."""

from collections.abc import Iterator
from contextlib import contextmanager

from feddp.errors import FedDPError


@contextmanager
def session_errors(what: str, remedy: str) -> Iterator[None]:
    """Turns an exception of any other type into a FedDPError: `what` failed, the exception, the remedy."""
    try:
        yield
    except FedDPError:
        raise
    except Exception as error:
        raise FedDPError(f"{what} ({type(error).__name__}: {error}); {remedy}") from error
