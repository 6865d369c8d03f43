"""Another FLARE at a site: one message that names both versions and the remedy, whatever it is that the other one lacks."""

import sys
from types import ModuleType

import nvflare
import pytest
from typer.testing import CliRunner

from feddp import cli
from feddp.errors import InputError
from feddp.kit.installed import NEEDED, other_flare
from support import ROOT

REMEDY = f"but this version of FedDP needs FLARE {NEEDED}; install this package's own FLARE in its environment"


def test_the_needed_version_is_that_of_the_package():
    first, second = map(int, NEEDED.split("."))
    assert f'"nvflare>={first}.{second},<{first}.{second + 1}"' in (ROOT / "pyproject.toml").read_text()
    assert other_flare() is None


@pytest.mark.parametrize("version", ["2.8.1", "2.10.0", "2.7", "3.0", "2.90.1"])
@pytest.mark.parametrize("command", [["kit", "check", "."], ["kit", "approve", ".", "."], ["kit", "start", "."]])
def test_no_kit_is_read_with_another_flare(monkeypatch, tmp_path, version, command):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(nvflare, "__version__", version)
    done = CliRunner().invoke(cli.app, command)
    assert isinstance(done.exception, InputError)
    assert f"FLARE {version} is installed here, {REMEDY}" in str(done.exception)


@pytest.mark.parametrize("version", ["2.9.0", "2.9.3", "2.9.0rc1"])
def test_the_control(monkeypatch, tmp_path, version):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(nvflare, "__version__", version)
    done = CliRunner().invoke(cli.app, ["kit", "check", "."])
    assert "holds no startup kit" in str(done.exception)


def test_no_flare_at_all(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvflare", ModuleType("nvflare"))
    assert f"FLARE none is installed here, {REMEDY}" in other_flare()


@pytest.mark.parametrize("error", [ImportError("no DOCKER_START_SH"), AttributeError("x"), KeyError("x"), TypeError("x")])
def test_what_another_flare_lacks_in_any_command_ends_in_the_same_words(monkeypatch, capsys, error):
    """With the right FLARE the same error is a bug of ours, and shows itself."""

    def fails():
        raise error

    monkeypatch.setattr(cli, "app", fails)
    with pytest.raises(type(error)):
        cli._run()
    monkeypatch.setattr(nvflare, "__version__", "2.8.1")
    with pytest.raises(InputError, match="FLARE 2.8.1 is installed here"):
        cli._run()
