"""Which rounds, phases and epochs a site can be asked for: those of its plan, whose beginning it still knows."""

from feddp.errors import PolicyError
from feddp.training.store import State, Store


def require(site: str, what: str, value: object, least: int, most: int) -> None:
    """PolicyError for what is no whole number from `least` to `most`."""
    if type(value) is not int or not least <= value <= most:
        raise PolicyError(f"site {site}: it was asked for {what} {value!r}, where its plan has {least} to {most}")


def state_before(site: str, store: Store, step: int, what: str, first: bool) -> State:
    """The state that a step begins with: the one after the step before, or the latest where this site missed some.

    Raises:
        PolicyError: the site has gone on since, and the state is gone; the `first` step needs none.
    """
    state = store.load_state(step)
    if not first and state.round < step < store.latest() - 1:  # the last one may come again, with a gap before it
        raise PolicyError(
            f"site {site}: it was asked for {what} again, or after a later one, and no longer has the state that it begins"
            " with; submit the job anew"
        )
    return state
