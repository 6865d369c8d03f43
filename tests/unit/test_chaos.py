"""The exit code of tests/chaos.py; its runs: tests/federation/test_chaos.py."""

import sys

import pytest

import chaos


@pytest.mark.parametrize(
    ("kills", "outcomes", "code"),
    [
        (2, [{"kills": ["command after 3 events"]}, {}], 0),
        (2, [{}, {}], 1),  # no kill landed: nothing is shown
        (0, [{}], 0),  # none was asked for
        (1, [{"kills": ["command after 3 events"], "differing": ["shared.safetensors"]}], 1),
        (1, [{"kills": ["command after 3 events"], "left": ["a process"]}] * 256, 1),  # an exit code has 8 bits
    ],
)
def test_the_exit_code(kills, outcomes, code, tmp_path, monkeypatch, capsys):
    (tmp_path / "whole-feddp").mkdir()
    (tmp_path / "whole-feddp/results.json").write_text("{}")
    monkeypatch.setattr(chaos, "survive", lambda arguments, seed, *_: chaos.Outcome(seed, **outcomes[seed]))
    options = ["--data", tmp_path, "--out", tmp_path, "--kills", kills, "--runs", len(outcomes), "--roles", "site job"]
    monkeypatch.setattr(sys, "argv", ["chaos.py", *map(str, options)])
    assert chaos.main() == code
    said = "no kill landed: no process to kill was there (--roles site job)"
    assert (said in capsys.readouterr().err) == (outcomes == [{}, {}])
