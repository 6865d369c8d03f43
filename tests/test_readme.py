"""The README names what there is: methods, networks, studies, ways, commands, dependencies."""

import re

import pytest
import typer

from feddp.adaptation.strategies import STRATEGIES
from feddp.cli import app
from feddp.compare.studies import OUTSIDE, STUDIES, TABLE_II
from feddp.methods import METHODS
from feddp.networks import NETWORKS
from feddp.partition import NONE, ROLES
from feddp.protocol import CONSENTS
from support import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
THREATS = (ROOT / "provisioning/threat-model.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", README, re.MULTILINE))


def test_every_method_has_one_row_and_no_row_is_of_another():
    assert sorted(re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)) == sorted(METHODS)


@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].federated])
def test_a_row_says_nothing_is_private_where_nothing_is(name):
    """`virtual_class` decides by its plan: its row is about the default, where two of the affinity's layers are private."""
    private = METHODS[name].private != (NONE,) or name == "virtual_class"
    assert ROWS[name].startswith("nothing") != private


@pytest.mark.parametrize("name", [*STUDIES, *(name for name in OUTSIDE if name != TABLE_II), *STRATEGIES, *CONSENTS])
def test_what_an_option_takes_is_named(name):
    assert re.search(rf"[`,|\" ]{name}[`,|\" ]", README), name


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_is_named(name):
    family, size = re.fullmatch(r"(.*?)(\d+|_b\d)?(?:-fpn)?", name).groups()
    section = README.split("\nNetworks: ")[1].split("\n\n")[0]
    assert name in section or (family.split("_")[0] in section and (size or "").lstrip("_") in section), name


def test_every_command_is_named():
    commands = typer.main.get_command(app).commands
    assert "job-outside" in commands
    assert [name for name in commands if f"feddp {name}" not in README] == []


def test_every_role_that_a_policy_may_keep_is_named():
    levels = {role for role in ROLES if re.fullmatch(r"decoder\.\d", role)}
    section = README.split("- `private`: roles")[1].split("\n- ")[0]
    assert {"decoder.1", "decoder.5"} <= levels
    assert [role for role in set(ROLES) - levels if role not in section] == []


def test_every_requirement_is_explained():
    """Its row in the dependency table, by the name that pip knows it by."""
    pinned = {re.split(r"[=;]", line)[0] for line in (ROOT / "requirements.txt").read_text().splitlines() if "==" in line}
    table = README.split("## What each dependency is for")[1]
    named = {name.strip() for row in re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE) for name in row.split(",")}
    assert pinned == named - {"package", "---"}


@pytest.mark.parametrize("text", [README, THREATS], ids=["README", "threat model"])
def test_every_test_that_is_named_is_there(text):
    """A file of tests, a test, or the beginning of some tests' names; files of the package likewise."""
    sources = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py")}
    tests = [name for source in sources.values() for name in re.findall(r"^def (test_\w+)", source, re.MULTILINE)]
    named = set(re.findall(r"\btest_\w+", text))
    assert len(named) >= 5
    assert [n for n in named if n not in sources and not any(t == n or n[-1] == "_" and t.startswith(n) for t in tests)] == []
    assert [p for p in re.findall(r"`((?:tests|custom)/[\w/]+\.py)`", text) if not (ROOT / p).exists()] == []
