"""Plans drawn at random: each is refused in one short line, or is a plan whose every value is of its type and in its range."""

import json
import math
import re

from hypothesis import given
from hypothesis import strategies as st

from feddp.errors import InputError
from feddp.limits import CHANNELS, CLASSES, SIZE
from feddp.methods import METHODS
from feddp.plan.schema import Plan
from support.fuzz import ANY, SCALAR, cases, changed, tried

GOOD = {
    "method": "feddp",
    "network": "pvt_v2_b0-fpn",
    "channels": 3,
    "classes": ["disc", "cup"],
    "labels": "nested",
    "size": 64,
    "rounds": 2,
    "seed": 7,
    "stages": ["train", "calibrate"],
    "sites": ["A", "B"],
    "weights": "5a" * 32,
    "settings": {"lr": 0.01, "batch": "4", "augment": False, "private": "query,head", "lambda": 0},
}
NAMES = [(method, name) for method in METHODS for name in Plan.known_settings(method)]


def read(data):
    """The plan, or None if it is refused in a line that a user can read."""
    plan, error = tried(InputError, Plan.from_json, data)
    assert len(error) < 4000
    assert len(error.splitlines()) <= 1
    return plan


def check(plan):
    """What every plan is, whatever it was read from."""
    assert 1 <= plan.channels <= CHANNELS
    assert 32 <= plan.size <= SIZE
    assert 1 <= plan.rounds <= 100_000
    assert 1 <= len(plan.classes) <= CLASSES
    for name in ("channels", "size", "rounds", "seed"):
        assert type(getattr(plan, name)) is int
    assert all(re.fullmatch(r"[\w .+-]{1,64}", name, re.ASCII) for name in (*plan.classes, *plan.sites))
    known = plan.known_settings(plan.method)
    for name, value in plan.settings.items():
        default = known[name]
        if isinstance(default, bool | int | float | str):
            assert type(value) is type(default)
        if isinstance(value, float):
            assert math.isfinite(value)
    again = Plan.from_json(json.loads(json.dumps(plan.to_json(), allow_nan=False)))
    assert again == plan
    assert again.digest() == plan.digest()


@cases(60)
@given(ANY)
def test_any_json(data):
    assert read(data) is None


@cases(150)
@given(changed(GOOD))
def test_a_plan_with_changed_entries(data):
    if plan := read(data):
        check(plan)


@cases(200)
@given(st.sampled_from(NAMES), SCALAR | ANY)
def test_a_setting_of_any_value(place, value):
    """What is accepted of a number is a number, or ASCII text of one: no other script's digits, blanks or underscores."""
    method, name = place
    plan = read(GOOD | {"method": method, "stages": [], "settings": {name: value}})
    if plan is None:
        return
    check(plan)
    default = plan.known_settings(method)[name]
    kept = plan.settings.get(name, default)
    if isinstance(default, bool):
        assert isinstance(value, bool) or value.lower() in ("true", "false")
    elif isinstance(default, int | float):
        assert type(value) in (int, float) or re.fullmatch(r"[-+.0-9eE]+", value)
        assert kept == float(value)
