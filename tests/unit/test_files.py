"""A run's files: JSON is written whole or not at all, and event lines are read back as far as they are whole."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from feddp import files
from feddp.errors import FedDPError, InputError, PolicyError
from feddp.files import append_event, events_after, read_events, read_results, write_json, write_text
from feddp.reading import is_count, read_own


@pytest.fixture
def umask():
    """Sets the umask of a test, and the former one afterwards."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def test_a_run_that_is_not_there_is_told_from_one_that_is_not_finished(tmp_path):
    for run, why in ((tmp_path / "nowhere", "it does not exist"), (tmp_path, "it has no results.json")):
        with pytest.raises(FedDPError) as error:
            read_results(run)
        assert str(error.value) == f"{run} is not a finished run ({why}); name the --out folder of a `feddp run`"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_json_is_indented_and_ends_its_last_line(tmp_path):
    write_json(tmp_path / "a.json", {"γ": [1, 2.5], "b": None})
    assert (tmp_path / "a.json").read_bytes() == b'{\n  "\\u03b3": [\n    1,\n    2.5\n  ],\n  "b": null\n}\n'
    assert names(tmp_path) == ["a.json"]


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_an_interrupted_write_leaves_the_old_content(tmp_path, monkeypatch, moment):
    path = tmp_path / "a.json"
    write_json(path, {"round": 1})

    def crash(*_):
        raise OSError("power cut")

    monkeypatch.setattr(os, moment, crash)
    with pytest.raises(OSError, match="power cut"):
        write_json(path, {"round": 2})
    assert json.loads(path.read_text()) == {"round": 1}
    assert names(tmp_path) == ["a.json"]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b'{"a": ', "is not readable JSON (Expecting value: line 1 column 7 (char 6))"),
        (b"\xff", "is not readable JSON ('utf-8' codec can't decode byte 0xff in position 0: invalid start byte)"),
        (b"[" * 33 + b"]" * 33, "is nested more than 32 deep"),
        (b'{"a": [{"b": 1, "c": 0, "b": 2}]}', "is not readable JSON (the key 'b' occurs twice)"),
        (b'["a"]', "holds no JSON object"),
    ],
)
def test_an_own_file_that_is_damaged_is_refused_with_the_remedy(tmp_path, content, what):
    path = tmp_path / "own.json"
    path.write_bytes(content)
    for refusal in (InputError, PolicyError):
        with pytest.raises(refusal) as refused:
            read_own(path, refusal, "remove it")
        assert str(refused.value) == f"{path} {what}; remove it"
    path.write_text('{"a": 1}')
    assert read_own(path, PolicyError, "remove it") == {"a": 1}, "the control"


def test_content_that_is_no_json_leaves_the_old_content(tmp_path):
    write_json(tmp_path / "a.json", {"round": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"round": object()})
    assert json.loads((tmp_path / "a.json").read_text()) == {"round": 1}


def test_a_killed_writer_leaves_the_old_content_and_blocks_no_other(tmp_path):
    (tmp_path / "a").write_text("old")
    lines = (
        "import os, signal, sys; from pathlib import Path; from feddp.files import replacing\n"
        "with replacing(Path(sys.argv[1])) as part:\n"
        "    part.write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", lines, str(tmp_path / "a")], check=False).returncode == -9
    assert (tmp_path / "a").read_text() == "old"
    assert [name[:3] for name in names(tmp_path)] == [".a.", "a"]
    write_text(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "new"


def test_threads_that_write_the_same_file_do_not_disturb_each_other(tmp_path):
    texts, failed = [str(digit) * 100_000 for digit in range(4)], []

    def write(text: str) -> None:
        try:
            for _ in range(10):
                write_text(tmp_path / "a", text)
        except OSError as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert (tmp_path / "a").read_text() in texts
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize(("mask", "mode", "given"), [(0o022, 0o666, 0o644), (0o077, 0o666, 0o600), (0o022, 0o600, 0o600)])
def test_a_file_has_the_mode_asked_for_less_the_umask(tmp_path, umask, mask, mode, given):
    (tmp_path / "a.json").touch(mode=0o666)
    umask(mask)
    write_json(tmp_path / "a.json", {}, mode=mode)
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == given


def test_events_are_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr(files.time, "time", lambda: 5.5)
    path = tmp_path / "progress.jsonl"
    assert read_events(path) == []
    append_event(path, "ask", task="train", sites=["A", "Ö"])
    append_event(path, "done")
    ask = {"event": "ask", "time": 5.5, "task": "train", "sites": ["A", "Ö"]}
    assert read_events(path) == [ask, {"event": "done", "time": 5.5}]
    assert path.read_bytes().startswith(b'{"event": "ask", "time": 5.5, "task": "train", "sites": ["A", "\\u00d6"]}\n')


def test_a_torn_last_line_is_not_read_until_it_is_whole(tmp_path):
    path = tmp_path / "progress.jsonl"
    append_event(path, "round", round=1)
    whole = path.stat().st_size
    with open(path, "a") as handle:
        handle.write('{"event": "rou')
    assert [event["round"] for event in read_events(path)] == [1]
    events, end = events_after(path, 0)
    assert (len(events), end) == (1, whole)
    assert events_after(path, end) == ([], whole)
    with open(path, "a") as handle:
        handle.write('nd", "round": 2}\n')
    assert events_after(path, end) == ([{"event": "round", "round": 2}], path.stat().st_size)


def test_the_results_of_a_run_name_its_sites(tmp_path):
    with pytest.raises(FedDPError, match="is not a finished run .*name the --out folder"):
        read_results(tmp_path)
    write_json(tmp_path / files.RESULTS, {"sites": {}})
    with pytest.raises(FedDPError, match="has no sites with valid folder names"):
        read_results(tmp_path)
    write_json(tmp_path / files.RESULTS, {"sites": {"A": {}}})
    assert read_results(tmp_path) == {"sites": {"A": {}}}


def test_it_imports_nothing_heavy():
    lines = "import sys, feddp.files; print(*sorted({'torch', 'numpy', 'monai', 'nvflare'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=True).stdout == "\n"


@pytest.mark.parametrize("line", ["{]", "7", '"round"'])
def test_a_strange_line_among_events_names_its_file(tmp_path, line):
    path = tmp_path / "progress.jsonl"
    path.write_text(f'{{"event": "ask"}}\n{line}\n', encoding="utf-8")
    with pytest.raises(InputError, match=r"progress\.jsonl"):
        read_events(path)


@pytest.mark.parametrize(("value", "counts"), [(0, True), (7, True), (-1, False), (10**30, False), (True, False), (2.0, False)])
def test_a_count_is_a_whole_number_of_a_usual_size(value, counts):
    """`true` is 1 to Python, and no number of rounds."""
    assert is_count(value) is counts
