"""Spacing, slices and volumes in split.csv: what is written is read, what is wrong is named, old folders still read."""

import json

import numpy as np
import pytest

from feddp.data.check import check
from feddp.data.description import HEADER, PLACED, Position, Row, read_split
from feddp.data.folder import SiteFolder, write_site
from feddp.data.folds import deal, write_fold
from feddp.data.loading import spacing

METADATA = {"name": "toy", "channels": 1, "classes": ["tumour"], "labels": "nested", "volumes": "volume"}
PLACES = {f"v{n}_{k}": Position(f"v{n}", k, (0.5, 0.8), 3.0) for n in range(6) for k in range(2)}


@pytest.fixture
def site(tmp_path):
    """Three patients with two volumes each, of two slices of 6 x 8 pixels."""
    words = dict(zip("abc", ("train", "val", "test"), strict=True))
    image, mask = np.full((6, 8), 90, np.uint8), np.eye(6, 8, dtype=np.uint8)
    samples = []
    for name, place in PLACES.items():
        patient = "abc"[int(name[1]) // 2]
        samples.append((name, patient, words[patient], image, mask, place))
    write_site(tmp_path / "A", METADATA, samples)
    return tmp_path / "A"


def test_what_is_written_is_read(site):
    assert check(site) == []
    folder = SiteFolder.open(site)
    assert {row.image: row.place for row in folder.rows} == PLACES
    assert [folder.case_of(row) for row in folder.rows_of("test")] == ["v4", "v4", "v5", "v5"]


def test_by_patient_a_case_is_the_patient_even_where_volumes_are_listed(site):
    (site / "dataset.json").write_text(json.dumps(METADATA | {"volumes": "patient"}))
    folder = SiteFolder.open(site)
    assert {folder.case_of(row) for row in folder.rows} == {"a", "b", "c"}


def test_the_spacing_follows_the_size_of_the_network(site):
    """6 rows of 0.5 mm span 3 mm, 8 columns of 0.8 mm span 6.4 mm; at 32 x 32 these are 0.09375 and 0.2 mm per pixel."""
    folder = SiteFolder.open(site)
    assert spacing(folder, folder.rows[0], 32) == pytest.approx((0.09375, 0.2))
    assert spacing(folder, Row("v0_0", "a", "train"), 32) is None


def test_folds_keep_the_places(site, tmp_path):
    folder = SiteFolder.open(site)
    for number, lines in enumerate(deal(folder, 3, seed=0)):
        write_fold(folder, tmp_path / f"fold-{number}/A", lines)
        assert {row.image: row.place for row in SiteFolder.open(tmp_path / f"fold-{number}/A").rows} == PLACES


def test_a_table_without_places_has_three_columns(tmp_path):
    image = np.zeros((6, 8), np.uint8)
    metadata = {key: value for key, value in METADATA.items() if key != "volumes"}
    write_site(tmp_path / "B", metadata, [(f"i{n}", f"p{n}", w, image, image) for n, w in enumerate(("train", "val", "test"))])
    assert (tmp_path / "B/split.csv").read_text().splitlines()[0] == ",".join(HEADER)
    assert all(row.place == Position() for row in SiteFolder.open(tmp_path / "B").rows)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("v,0,0,1,1", "has 'v,0,0,1,1' as volume,slice,row_mm,column_mm,slice_mm"),
        ("v,0,nan,1,1", "in millimetres, or leave fields empty"),
        ("v,0,1,inf,1", "in millimetres"),
        ("v,0,1e9,1,1", "in millimetres"),
        ("v,0,1,,1", "in millimetres"),
        ("v,-1,1,1,1", "in millimetres"),
        ("v,1.5,1,1,1", "in millimetres"),
        (",3,1,1,1", "in millimetres"),
        ("v,x,1,1,1", "in millimetres"),
        ("v,0,1,1", "does not have eight fields"),
        ("w,0,1,1,1", "volume w is of the patients q and p"),
    ],
)
def test_a_wrong_place_is_named(tmp_path, fields, message):
    lines = [",".join(PLACED), "a,q,train,w,0,1,1,1", f"b,p,val,{fields}"]
    (tmp_path / "split.csv").write_text("\n".join(lines))
    _, problems = read_split(tmp_path / "split.csv")
    assert message in str(problems[0])


def test_a_slice_twice_is_named_and_empty_fields_are_unknown(tmp_path):
    (tmp_path / "split.csv").write_text(",".join(PLACED) + "\na,p,train,v,0,,,\nb,p,train,v,0,,,\nc,p,train,,,,,\n")
    rows, problems = read_split(tmp_path / "split.csv")
    assert [problem.what for problem in problems] == ["slice 0 of volume v is listed more than once"]
    assert [row.place for row in rows] == [Position("v", 0), Position("v", 0), Position()]
