"""Drawn inputs: how many, and JSON values of any kind.

The draws follow from each test alone, so a run repeats to the bit. FEDDP_FUZZ=5000 draws so many for each test.
"""

import os
import string

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st


def cases(few: int) -> settings:
    """`few` examples, or as many as FEDDP_FUZZ says."""
    return settings(
        max_examples=int(os.environ.get("FEDDP_FUZZ", few)),
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def tried(kind: type[Exception], call, *arguments):
    """(what the call returns, ""), or (None, the message of the error of this kind in which it ends)."""
    try:
        return call(*arguments), ""
    except kind as error:
        return None, str(error)


TEXT = st.one_of(
    st.text(max_size=20),
    st.text(string.digits + "٤１eE+-._ \n", max_size=8),
    st.sampled_from(["", ".", "..", "a/b", "\0", "\ud800", "nan", "inf", "true", "None", "x" * 300, "9" * 60]),
)
NUMBER = st.one_of(
    st.integers(-3, 12),
    st.integers(),
    st.floats(),
    st.sampled_from([2**53, 2**53 + 1, 2**63, -(2**63) - 1, 10**60, 10**400, 1e300, -0.0]),
)
SCALAR = st.one_of(st.none(), st.booleans(), NUMBER, TEXT)
ANY = st.recursive(SCALAR, lambda below: st.lists(below, max_size=3) | st.dictionaries(TEXT, below, max_size=3), max_leaves=6)


@st.composite
def changed(draw, tree, value=ANY):
    """A copy of a tree of dictionaries and lists in which one or two places hold another value, are missing or are new."""

    def change(node):
        places = list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []
        if not places or draw(st.integers(0, 3)) == 0:
            return draw(value)
        place = draw(st.sampled_from(places))
        node = node.copy()
        how = draw(st.integers(0, 7))
        if how == 0:
            del node[place]
        elif how == 1 and isinstance(node, dict):
            node[draw(TEXT)] = draw(value)
        else:
            node[place] = change(node[place])
        return node

    for _ in range(draw(st.integers(1, 2))):
        tree = change(tree)
    return tree
