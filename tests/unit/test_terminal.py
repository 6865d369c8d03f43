"""A terminal obeys nothing of what is shown: every way out of the package to a terminal, with a text that commands one."""

import io
import logging
import re
import sys
import warnings

import pytest
from rich.console import Console
from rich.live import Live
from rich.progress import SpinnerColumn
from rich.table import Table
from rich.text import Text

from feddp.data.progress import track
from feddp.errors import InputError
from feddp.terminal import Screen, guard_streams, note, note_uncaught, progress, say, working
from support.command import ended

# a window's title, a colour, the same in Unicode's second block (CSI), a turned direction, an end of line of Unicode, a link
TITLE = "\x1b]0;owned\x07"
EVIL = f"{TITLE}\x1b[31mred\x9b1A\u202egpj\u2028feddp: forged\x7f\x08"
OBEYED = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]|\x1b\\]|owned\x07")
MARKUP = "[red]x[/red] [link=https://owned.example]y[/link] :smiley: [/nothing]"


def silent(text: str) -> bool:
    """Whether the text holds nothing of `EVIL` that a terminal obeys; it may hold colours and moves of rich itself."""
    return not OBEYED.search(text) and "\x1b[31mred" not in text and "\x1b]8" not in text


def test_the_control_obeys():
    print(EVIL, file=(raw := io.StringIO()))
    assert not silent(raw.getvalue())
    Console(file=(shown := io.StringIO()), force_terminal=True).print("[link=https://owned.example]y[/link]")
    assert not silent(shown.getvalue())
    Console(file=(shown := io.StringIO()), force_terminal=True).print(Text(EVIL))
    assert not silent(shown.getvalue())


@pytest.mark.parametrize("write", [say, note])
def test_a_line_is_one_line(write, capsys):
    write(f"a{EVIL}\nfeddp: forged\r\nfeddp: forged")
    text = "".join(capsys.readouterr())
    assert "\x1b" not in text
    assert silent(text)
    assert text.count("\n") == 1
    assert len(text.splitlines()) == 1


def _table() -> Table:
    table = Table(title=EVIL + MARKUP, caption=EVIL)
    table.add_column(EVIL)
    table.add_row(EVIL + MARKUP)
    table.add_row(Text(EVIL))
    return table


@pytest.mark.parametrize("shown", [EVIL + MARKUP, Text(EVIL), _table()], ids=["text", "Text", "table"])
def test_a_screen_shows_texts_as_they_are(shown):
    screen = Screen(file=(found := io.StringIO()), force_terminal=True, width=500)
    screen.print(shown, style="dim")
    with Live(console=screen, auto_refresh=False) as live:
        live.update(shown, refresh=True)
    assert silent(found.getvalue())
    assert "]0;owned" in found.getvalue()
    if isinstance(shown, str):
        assert MARKUP in found.getvalue()


def test_bars_show_texts_as_they_are(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    for name, value in {"TERM": "xterm", "COLUMNS": "500", "FORCE_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    with progress(SpinnerColumn(), "{task.description}", "{task.fields[left]}") as bar:
        bar.add_task(EVIL + MARKUP, left=EVIL)
    assert [*track([1, 2], EVIL + MARKUP)] == [1, 2]
    with working(EVIL + MARKUP):
        pass
    assert terminal.getvalue().count(MARKUP.split()[0]) >= 3
    assert silent(terminal.getvalue())


def test_what_libraries_write_is_plain(capsys, monkeypatch):
    """Warnings, records without a handler, and the traceback of an error that is a bug."""
    monkeypatch.setattr(logging, "lastResort", logging._StderrHandler(logging.WARNING))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        guard_streams()
        warnings.warn(EVIL, UserWarning, stacklevel=1)
    logger = logging.Logger("a library")
    logger.warning("%s", EVIL)
    try:
        raise RuntimeError(EVIL)
    except RuntimeError as error:
        note_uncaught(type(error), error, error.__traceback__)
    said = capsys.readouterr().err
    assert said.count("]0;owned") == 3
    assert silent(said)


@pytest.mark.parametrize("words", [(EVIL,), ("run", f"--{EVIL}"), ("methods", EVIL), ("run", "--env", EVIL)])
def test_a_word_that_is_no_option_is_plain(feddp, words):
    """A shell makes words of the names of files."""
    code, _, said = feddp(*words)
    assert code == 2
    assert silent(said)


def test_a_bug_is_told_in_plain_words(monkeypatch, capsys):
    def broken(*_):
        raise OSError(EVIL)

    monkeypatch.setattr("feddp.run.folders.listed", broken)
    assert ended(["feddp", "runs", "list"]) == 1
    said = capsys.readouterr().err
    assert "this is a bug" in said
    assert silent(said)
    monkeypatch.setattr("feddp.run.folders.listed", lambda _: (_ for _ in ()).throw(InputError(f"{EVIL}\nfeddp: forged")))
    assert ended(["feddp", "runs", "list"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
