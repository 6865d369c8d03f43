"""Tables and pictures are written whole or not at all: a comparison that is killed leaves the former ones."""

import os

import pytest

from feddp.reporting.plots import draw_points, save
from feddp.reporting.tables import ResultTable, Value


def table(mean: float) -> ResultTable:
    return ResultTable("t", "T", ("M", "x"), (None, max), (("a, b", Value(mean, 0.5)),))


def test_the_files_of_a_table_and_a_picture(tmp_path):
    """The CSV has a column of its own for ±, and the lines' ends of Python's writer."""
    table(2.0).write(tmp_path)
    save(draw_points({"a": (1.0, 2.0, 0.5)}, "x", "y"), tmp_path / "p.png")
    assert (tmp_path / "table_t.csv").read_bytes() == 'M,x,x ±\r\n"a, b",2.0,0.5\r\n'.encode()
    assert "2.00 $\\pm$ 0.50" in (tmp_path / "table_t.tex").read_text(encoding="utf-8")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.png", "table_t.csv", "table_t.tex"]


@pytest.mark.parametrize("name", ["table_t.csv", "table_t.tex", "p.png"])
def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch, name):
    (tmp_path / name).write_text("old")
    replace = os.replace

    def cut(source, target):
        if os.path.basename(target) == name:
            raise OSError("power cut")
        replace(source, target)

    monkeypatch.setattr(os, "replace", cut)
    with pytest.raises(OSError, match="power cut"):
        save(draw_points({}, "x", "y"), tmp_path / name) if name == "p.png" else table(2.0).write(tmp_path)
    assert (tmp_path / name).read_text() == "old"
