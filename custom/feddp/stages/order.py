"""Order of the steps: a site accepts rounds, phases and epochs of its plan for which it still has the state before."""

from feddp.errors import PolicyError
from feddp.methods.base import HEADS
from feddp.plan.schema import Plan
from feddp.training.store import State, Store


def require(site: str, what: str, value: object, least: int, most: int) -> None:
    """Raises PolicyError unless `value` is a whole number from `least` to `most`."""
    if type(value) is not int or not least <= value <= most:
        raise PolicyError(f"site {site}: it was asked for {what} {value!r}, where its plan has {least} to {most}")


def state_before(site: str, store: Store, step: int, what: str, first: bool) -> State:
    """Returns the state before a step: the state after the step before it, or the latest one if this site missed steps.

    Raises:
        PolicyError: the site is past this step and has removed that state (the `first` step needs none), or the job continues
            a run that is much further.
    """
    if step < store.least:
        raise PolicyError(
            f"site {site}: a job that continues the run asked it for {what} again, {store.latest() - step} steps back; refused,"
            " since a run that is rolled back shows what one image changes"
        )
    state = store.load_state(step)
    if not first and state.round < step < store.latest() - 1:  # the last step may be repeated, also after a gap
        raise PolicyError(
            f"site {site}: it was asked for {what} again, or after a later one, and no longer has the state that it begins"
            " with; submit the job anew"
        )
    return state


def behind(plan: Plan) -> int:
    """Returns by how many steps a server that continues a run may be behind a site: it lost its latest file, and the site had
    answered the round after it. If the run is extended, the heads' epochs of its former end come on top."""
    epochs = plan.heads.heads_epochs if HEADS in plan.stages else 0
    return 2 * plan.phases + epochs
