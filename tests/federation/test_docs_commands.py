"""What README and docs tell a reader to type is typed: every shell block and every Python block, page by page.

Runs are shortened (`SHORT`) and take small images and a small network. Those that a reader would give to FLARE's simulator
run in this process, which gives the same bits (test_simulator.py), and so does that of `poc/run.sh`, which test_poc.py runs as
it is. Blocks that need more, such as kits, are marked with the test that runs them (docs_pages.py).
"""

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from feddp.methods import METHODS
from feddp.networks import NETWORKS
from feddp.run import options
from feddp.run.local import local
from support.command import ended
from support.docs_pages import PAGES, ROOT, SHELL, blocks, text_of
from support.small import Small

pytestmark = pytest.mark.poc

SITES = ("CS", "DU", "FG", "HT")
# by command, what an option becomes; it is added where it is missing
SHORT = {
    "run": {"--rounds": "1", "--size": "32", "--network": "small"},
    "compare": {"--rounds": "1", "--size": "32", "--calibration-epochs": "1", "--seeds": "0", "--network": "small"},
    "adapt": {"--epochs": "1"},
    "join": {"--epochs": "1"},
    "features": {"--pixels": "20"},
    "prepare": {"--size": "32"},
    "synthesize": {"--images": "12", "--size": "32"},
}
FIGURES = "docs/how-to/report.md"  # a comparison and reports: they are drawn there, and elsewhere no more than saved
HOME = ("--set", "batch=2", "--set", "tune_epochs=1", "--set", "calibration_epochs=1")  # of the local stages
SCRIPT = "#!/usr/bin/env bash\n"
NEEDED = re.compile(r"(?:--models |--run |--network |Path\(\")runs/([\w-]+)")
MADE = re.compile(r"--out runs/([\w-]+)")


def shortened(words: list[str]) -> list[str]:
    """A `feddp` command, for small images and one round."""
    name = next((word for word in words[1:3] if word in SHORT), "")
    for option, value in SHORT.get(name, {}).items():
        if option in words:
            words[words.index(option) + 1] = value
        else:
            words += [option, value]
    if "--folds" in words:
        words[words.index("--folds") + 1] = "2"
    return words + list(HOME if name in ("run", "compare") else ())


class Reader:
    """Who types the blocks of a page, in a folder of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.folder, self.patch, self.names = folder, monkeypatch, {}
        monkeypatch.chdir(folder)
        monkeypatch.setattr(options, "environment", lambda name: local)
        monkeypatch.setitem(NETWORKS, "small", Small)

    def shell(self, text: str) -> None:
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["feddp"]:
                self.feddp(*shortened(words)[1:])
            elif words[:2] == ["pip", "install"]:
                self.install(words[2:])
            elif words[:2] == ["poc/run.sh", "--out"]:
                self.feddp(*shortened(["feddp", "run", "--method", "feddp", "--data", "data/synthetic-4", *words[1:]])[1:])
            elif words and words[0] not in ("poc/run.sh", "tests/run.sh"):  # test_poc.py, and the test below
                path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
                subprocess.run(["bash", "-euc", line], cwd=self.folder, env={**os.environ, "PATH": path}, check=True)

    def feddp(self, *arguments: str) -> None:
        assert ended(["feddp", *arguments]) == 0, arguments

    def install(self, words: list[str]) -> None:
        """Into a folder of the reader's own, as a package beside ours."""
        site = self.folder / "site-packages"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(site)]
        subprocess.run([*command, *words], check=True)
        self.patch.syspath_prepend(site)
        self.patch.delitem(vars(METHODS), "_others", raising=False)  # what this process has found so far

    def python(self, text: str) -> None:
        exec(compile(text, "page", "exec"), self.names)

    def read(self, page: str) -> None:
        for block in blocks(page):
            if block.title:
                path = self.folder / block.title
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text + "\n", encoding="utf-8")
            elif block.kind == "bash" and block.here:
                self.shell(block.text)
            elif block.kind == "python":
                self.python(block.text)


def linked(source: Path, target: Path) -> None:
    """A copy that takes no room; who writes a file anew leaves the other's alone."""
    shutil.copytree(source, target, copy_function=os.link, dirs_exist_ok=True)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """What is there before a page begins: the archive of the LGG data, small, what was made of it, and synthetic sites."""
    folder = tmp_path_factory.mktemp("world")
    rng = np.random.default_rng(0)
    with zipfile.ZipFile(folder / "lgg-mri-segmentation.zip", "w") as archive:
        for site in SITES:
            for patient in range(6):
                stem = f"kaggle_3m/TCGA_{site}_{patient}_19960909/TCGA_{site}_{patient}_19960909_1"
                mask = np.zeros((32, 32), np.uint8)
                mask[8:20, 10 : 16 + patient] = 255
                image = rng.integers(0, 90, (32, 32, 3), np.uint8) + mask[..., None] // 2
                for name, pixels in ((f"{stem}.tif", image), (f"{stem}_mask.tif", mask)):
                    written = io.BytesIO()
                    Image.fromarray(pixels).save(written, "tiff")
                    archive.writestr(name, written.getvalue())
    with pytest.MonkeyPatch.context() as patch:
        reader = Reader(folder, patch)
        reader.shell("feddp data prepare lgg --source lgg-mri-segmentation.zip --out data/lgg")
        reader.shell("feddp data synthesize --out data/synthetic-4")
    return folder


@pytest.fixture(scope="module")
def run_of(world, tmp_path_factory):
    """A finished run of a method, which a page says that the reader has."""
    folder = tmp_path_factory.mktemp("runs")
    linked(world, folder)

    def run(method: str) -> Path:
        if not (folder / "runs" / method).exists():
            with pytest.MonkeyPatch.context() as patch:
                Reader(folder, patch).shell(f"feddp run --method {method} --data data/lgg --out runs/{method}")
        return folder / "runs" / method

    return run


def test_figures_are_drawn_on_one_page():
    assert FIGURES in PAGES


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_says_works(page, world, run_of, tmp_path, monkeypatch, request):
    """From its first block to its last, in a folder that has what the page presupposes and not what it makes."""
    text = text_of(page)
    if page != FIGURES:
        request.getfixturevalue("empty_figures")
    linked(world, tmp_path)
    for made in re.findall(r"--out (data/[\w-]+)", text):
        shutil.rmtree(tmp_path / made, ignore_errors=True)
    for name in dict.fromkeys(NEEDED.findall(text)):
        if name not in MADE.findall(text):
            linked(run_of(name), tmp_path / "runs" / name)
    try:
        Reader(tmp_path, monkeypatch).read(page)
    finally:
        vars(METHODS).pop("_others", None)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_of_a_known_kind(page):
    """Shell and Python are run; JSON and TOML are what they say; text is output and layouts."""
    for block in blocks(page):
        assert block.kind in (*SHELL, "python", "json", "toml", "text", "mermaid"), block
        if block.kind == "json":
            json.loads(block.text)
        if block.note and not block.here and not block.note.startswith("not run:"):
            tests = re.findall(r"tests/([\w/]+)\.py", block.note)
            assert tests
            assert all(Path(page).name in (ROOT / f"tests/{test}.py").read_text(encoding="utf-8") for test in tests), block
    indented = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"^    (?:feddp|nvflare|python|pip) .*$", indented, re.MULTILINE) == [], "fence what is to be typed"


def test_only_what_needs_an_engine_is_not_run():
    skipped = {block.page for page in PAGES for block in blocks(page) if block.note.startswith("not run:")}
    assert skipped == {"docs/how-to/containers.md"}


@pytest.mark.parametrize(("failing", "code"), [("", 0), ("mypy", 1), ("lint-imports", 1), ("pytest", 5), ("ruff", 3)])
def test_tests_run_sh_gives_its_arguments_to_pytest_and_fails_with_any_of_its_tools(failing, code, tmp_path):
    """`tests/run.sh`, with tools that write down how they were called; one of them finds something."""
    for name in ("tests/run.sh", "poc/environment.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("python", "ruff", "mypy", "lint-imports", "chromium"):
        fails = f'case "{tool} $*" in *collect-only*) ;; *{failing}*) echo found; exit {code};; esac\n' if failing else ""
        (tools / tool).write_text(f'{SCRIPT}echo "{tool} $*" >> {tmp_path}/called\n{fails}')
        (tools / tool).chmod(0o755)
    (tmp_path / "poc/environment.sh").write_text(f'export PATH="{tools}:$PATH"\ncd "{tmp_path}"\n')
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}  # with a browser, which would be installed otherwise
    command = ["bash", "tests/run.sh", "tests/test_x.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert ("found" in done.stdout) == bool(failing)
    called = (tmp_path / "called").read_text().splitlines()
    tests = [line for line in called if "-m pytest" in line and "collect-only" not in line]
    assert len(tests) == (failing != "ruff"), "what a linter finds ends the run"
    assert all(line.endswith("tests/test_x.py") for line in tests)
    assert ("mypy " in called) == (failing not in ("ruff", "lint-imports"))
