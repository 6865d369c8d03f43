"""Which versions of packages may differ between the participants of a job."""

import pytest

from feddp.versions import ABSENT, PACKAGES, SERVER, UNKNOWN, as_numbers, as_texts, differences, installed, refusal

HERE = dict.fromkeys(PACKAGES, "2.5.3") | {"python": "3.11.9"}


def of(**sites):
    """The server's versions, and sites' that differ from them in these."""
    found = {site: HERE | {name.replace("_", "-"): text for name, text in other.items()} for site, other in sites.items()}
    return {SERVER: HERE} | found


# by hand, from the table's numbers of equal parts: what differs from 2.5.3 (Python: 3.11.9)
REFUSED = {
    "feddp": ("2.6.3", "3.5.3"),
    "nvflare": ("2.4.3", "1.5.3"),
    "torch": ("3.5.3", "1.13.1"),
    "timm": ("2.6.0", "0.9.16"),
    "segmentation-models-pytorch": ("2.4.0",),
    "monai": ("2.6.0",),
    "numpy": ("1.26.4", "3.0.0"),
}
SHOWN = {
    "python": ("3.12.1", "3.11.8"),
    "feddp": ("2.5.4",),
    "nvflare": ("2.5.0",),
    "torch": ("2.4.1", "2.5.4"),
    "timm": ("2.5.1",),
    "segmentation-models-pytorch": ("2.5.2",),
    "monai": ("2.5.9",),
    "numpy": ("2.4.0", "2.5.4"),
}
ALIKE = ("2.5.3", "2.5.3+cu130", "2.5.3rc1", "2.5.3.post1")


def test_the_table_names_what_is_compared():
    assert REFUSED.keys() | {"python"} == SHOWN.keys() == PACKAGES.keys()
    assert all(package.why for package in PACKAGES.values())


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in REFUSED.items() for text in texts])
def test_what_breaks_a_run_or_changes_its_results_is_refused(name, text):
    message = refusal(of(north={name: text}, south={}))
    assert message.startswith(f"versions differ: {name} is 2.5.3 at the server, {text} at north ({PACKAGES[name].why}). ")
    assert "south" not in message
    assert differences(of(north={name: text}), refused=False) == {}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in SHOWN.items() for text in texts])
def test_every_other_difference_is_shown(name, text):
    versions = of(north={name: text}, south={})
    assert refusal(versions) == ""
    assert differences(versions, refused=False) == {name: f"{name} is {HERE[name]} at the server, {text} at north"}


@pytest.mark.parametrize("text", ALIKE)
def test_builds_of_one_version_differ_in_nothing(text):
    versions = of(north={"torch": text})
    assert refusal(versions) == ""
    assert differences(versions, refused=False) == {}


@pytest.mark.parametrize("text", [ABSENT, UNKNOWN, ""])
@pytest.mark.parametrize("name", PACKAGES)
def test_what_a_site_does_not_tell_is_refused_where_it_must_be_known(name, text):
    """Where a number must be equal, none is not; of the server's own that it does not know, a site's is unknown likewise."""
    shown, refused = (differences(of(north={name: text}, south={}), refused=which) for which in (False, True))
    line = {name: f"{name} is {HERE[name]} at the server, {text or UNKNOWN} at north"}
    assert (shown, refused) == ((line, {}) if name == "python" else ({}, line))
    assert differences({SERVER: HERE | {name: text}, "north": HERE | {name: text}}, refused=True) == {}


def test_one_message_names_all_sites_and_versions():
    message = refusal(of(a={"nvflare": "2.4.0", "numpy": "1.26"}, b={"nvflare": "2.4.0"}, c={"nvflare": "2.6.1"}))
    assert "nvflare is 2.5.3 at the server, 2.4.0 at a and b, 2.6.1 at c (" in message
    assert "; numpy is 2.5.3 at the server, 1.26 at a (" in message
    named = "a and b and c"
    assert message.endswith(
        f". Install the server's versions, by the lock of the same release, at {named}, or export the job without {named}"
    )


def test_what_is_installed_here_leaves_as_numbers_and_is_read_back():
    here = installed()
    assert here.keys() == PACKAGES.keys()
    numbers = as_numbers(here)
    assert all(
        set(found) == {"major", "minor", "patch"} and all(type(n) is int for n in found.values()) for found in numbers.values()
    )
    assert refusal({SERVER: here, "site": as_texts(numbers)}) == ""
    assert differences({SERVER: here, "site": as_texts(numbers)}, refused=False) == {}


def test_by_hand():
    texts = {"torch": "2.15.0+cu130", "numpy": "2.4", "timm": "1.0.31.dev0", "monai": ABSENT}
    assert as_numbers(texts) == {
        "torch": {"major": 2, "minor": 15, "patch": 0},
        "numpy": {"major": 2, "minor": 4, "patch": 0},
        "timm": {"major": 1, "minor": 0, "patch": 31},
    }
    told = as_texts(as_numbers(texts) | {"numpy": {"major": 2}, "monai": {}})
    assert (told["torch"], told["timm"]) == ("2.15.0", "1.0.31")
    assert {told[name] for name in PACKAGES.keys() - {"torch", "timm"}} == {UNKNOWN}
