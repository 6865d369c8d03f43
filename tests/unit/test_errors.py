"""Every error that a user reads says what kind of thing is wrong; an aborted job is none of them."""

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from feddp import cli
from feddp.data.folder import SiteFolder, find_sites, refuse_occupied
from feddp.errors import BadFile, ContributionError, FedDPError, InputError, PolicyError, SealingError, Stopped, is_of_user
from feddp.files import read_results
from feddp.flare.arrival import Refused
from feddp.flare.bounds import Bounds
from feddp.flare.budget import Ledger
from feddp.flare.policy import Budget, SitePolicy
from feddp.flare.scopes import scopes_of
from feddp.methods.aggregation import Spec, average
from feddp.networks import build
from feddp.networks.header import outline
from feddp.partition import resolve
from feddp.plan.schema import Plan
from feddp.protocol import Sent
from feddp.reading import parse, read
from feddp.run.options import Options
from feddp.sealing.envelope import recipients_of
from feddp.sealing.session import as_bytes
from feddp.stages.order import require
from feddp.stages.tensors import Expected
from feddp.training.claim import require_job_id
from feddp.training.device import asked_for
from feddp.training.loop import fit_epoch
from feddp.training.settings import Training, pairs, require_most, require_name
from feddp.training.store import Store

ONE = {"w": torch.zeros(2)}
PLAN = Plan("feddp", "pvt_v2_b0-fpn", 3, ("lesion",), "nested", 32, 1)


def occupied(folder: Path) -> None:
    (folder / "a").touch()
    refuse_occupied([folder])


def spent(folder: Path) -> None:
    ledger = Ledger("A", folder)
    for job in ("one", "two"):
        ledger.enter(folder, job, Budget(jobs=1))


def unreadable_budget(folder: Path) -> None:
    (folder / "budget.json").write_text("[]")
    Ledger("A", folder).used()


def unreadable_privacy(folder: Path) -> None:
    (folder / "privacy.json").write_text("{}")
    scopes_of(folder / "privacy.json")


def another_plan(folder: Path) -> None:
    Store(folder).claim({"method": "feddp"})
    Store(folder).claim({"method": "fedavg"})


def too_large(folder: Path) -> None:
    (folder / "a").write_bytes(b"x" * 5)
    read(folder / "a", 4)


SAMPLE: dict[str, tuple[type[FedDPError], Callable[[Path], Any]]] = {
    "no folder of a site": (InputError, lambda folder: SiteFolder.open(folder / "A")),
    "no site below a root": (InputError, find_sites),
    "a folder that is taken": (InputError, occupied),
    "not a finished run": (InputError, read_results),
    "no file of weights": (InputError, lambda folder: outline(folder / "a.safetensors")),
    "a file too large": (BadFile, too_large),
    "no JSON": (BadFile, lambda folder: parse("{", folder)),
    "an unknown network": (InputError, lambda _: build("vgg", 3, 1)),
    "an unknown method": (InputError, lambda _: Options(method="x").plan({}, [])),
    "an option without a value": (InputError, lambda _: pairs(["lr"])),
    "a setting out of range": (InputError, lambda _: require_most("lr", 2, 1)),
    "no name": (InputError, lambda _: require_name("site", "a/b")),
    "not a job's id": (InputError, lambda _: require_job_id("../x")),
    "no such device": (InputError, lambda _: asked_for("cuda:63")),
    "an unknown role": (InputError, lambda _: resolve(torch.nn.Linear(1, 1), ("heads",))),
    "no policy": (PolicyError, lambda _: SitePolicy.of("A", None, simulated=False)),
    "an unknown property": (PolicyError, lambda _: SitePolicy.of("A", {"date": "/data"}, simulated=False)),
    "a wrong bound": (PolicyError, lambda _: Bounds.of("A", [])),
    "a budget that is used up": (PolicyError, spent),
    "a budget that cannot be read": (PolicyError, unreadable_budget),
    "a privacy.json that cannot be read": (BadFile, unreadable_privacy),
    "a job's folder claimed by another plan": (PolicyError, another_plan),
    "a round that the plan has not": (PolicyError, lambda _: require("A", "round", 7, 0, 5)),
    "wrong names": (ContributionError, lambda _: Spec.of(ONE, ("w",)).check("A", {})),
    "a wrong shape": (ContributionError, lambda _: Spec.of(ONE, ("w",)).check("A", {"w": torch.zeros(3)})),
    "values that are not finite": (ContributionError, lambda _: Spec.of(ONE, ("w",)).check("A", {"w": ONE["w"] / 0})),
    "no contribution": (ContributionError, lambda _: average({}, {})),
    "tensors among numbers": (ContributionError, lambda _: Expected(PLAN).check(Sent.NONE, "A", ONE)),
    "no envelope": (SealingError, lambda _: recipients_of("A", b"")),
    "tensors where bytes travel": (SealingError, lambda _: as_bytes("A", "sealed", ONE)),
}


@pytest.mark.parametrize("case", SAMPLE)
def test_what_is_wrong_decides_the_class(case, tmp_path):
    kind, wrong = SAMPLE[case]
    with pytest.raises(FedDPError) as raised:
        wrong(tmp_path)
    assert raised.type is kind


def test_the_kinds_are_apart():
    kinds = (InputError, PolicyError, ContributionError, SealingError)
    assert all(kind.__bases__ == (FedDPError,) for kind in kinds)
    assert issubclass(BadFile, InputError)
    assert issubclass(Refused, PolicyError)


def test_an_aborted_job_is_nobodys_mistake():
    assert not issubclass(Stopped, FedDPError)
    network = torch.nn.Linear(1, 1)
    optimizer, settings = torch.optim.SGD(network.parameters(), lr=0.1), Training(augment=False)
    with pytest.raises(Stopped):
        fit_epoch(network, optimizer, [{"image": torch.zeros(1, 1, 1)}], None, settings, seed=0, stopped=lambda: True)


@pytest.mark.parametrize("word", ["{data}/A", "--out={data}/A", "{data}/A/deeper/still", "{data}"])
def test_a_path_of_the_users_is_the_cause(word, tmp_path):
    refused = PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "A"))
    assert is_of_user(refused, ["run", "--data", "elsewhere", word.format(data=tmp_path)])


def test_a_path_may_be_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_of_user(PermissionError(errno.EACCES, "Permission denied", "out/sites"), ["--out", "out"])


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "No such file or directory", "/nowhere/of/ours"),
        ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
        OSError("neither number nor file"),
    ],
)
def test_any_other_error_of_the_system_is_a_bug(error, tmp_path):
    assert not is_of_user(error, ["run", "--data", str(tmp_path), ""])


def test_a_full_disk_is_no_bug():
    assert is_of_user(OSError(errno.ENOSPC, "No space left on device"), ["run"])


def ended(monkeypatch, capsys, tmp_path, error: Exception) -> tuple[int, str]:
    """Exit code and stderr of a command that ends in `error`."""

    def app():
        raise error

    monkeypatch.setattr(cli, "app", app)
    monkeypatch.setattr(cli.sys, "argv", ["feddp", "run", "--data", str(tmp_path / "data")])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = os.umask(0o077)
    try:
        with pytest.raises(SystemExit) as exit:
            cli.main()
    finally:
        os.umask(before)
    return exit.value.code, capsys.readouterr().err


def test_a_path_in_our_variables_is_the_users_too(monkeypatch, capsys, tmp_path):
    """FEDDP_MODELS stands for --registry."""
    refused = PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "models/deployments.jsonl"))
    assert ended(monkeypatch, capsys, tmp_path, refused)[0] == 1
    monkeypatch.setenv("FEDDP_MODELS", str(tmp_path / "models"))
    assert ended(monkeypatch, capsys, tmp_path, refused) == (2, f"feddp: {refused}\n")


def test_the_command_tells_a_mistake_from_a_bug(monkeypatch, capsys, tmp_path):
    """The traceback of a bug is in a file that its user alone may read."""
    assert ended(monkeypatch, capsys, tmp_path, PolicyError("no consent")) == (2, "feddp: no consent\n")
    refused = PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "data"))
    assert ended(monkeypatch, capsys, tmp_path, refused) == (2, f"feddp: {refused}\n")
    code, said = ended(monkeypatch, capsys, tmp_path, FileNotFoundError(errno.ENOENT, "No such file", "/nowhere/of/ours"))
    (log,) = tmp_path.glob("feddp-*.log")
    assert code == 1
    assert said.endswith(f"(FileNotFoundError): this is a bug; please report it with {log}\n")
    assert "Traceback" in log.read_text()
    assert log.stat().st_mode & 0o777 == 0o600
