"""What `feddp kit check` says of a launcher's settings of another kind; of kits of `nvflare deploy prepare`: test_images.py."""

import json
from pathlib import Path

import pytest

from feddp.errors import BadFile
from feddp.kit.containers import LAUNCHERS, Containers


class FakeKit:
    """A kit whose launcher has these arguments."""

    def __init__(self, folder: Path, runtime: str, arguments: object):
        self.folder = folder
        prefix = next(prefix for prefix, name in LAUNCHERS.items() if name == runtime)
        (folder / "local").mkdir()
        launcher = {"id": "x", "path": f"{prefix}Launcher", "args": arguments}
        self.effective("resources.json").write_text(json.dumps({"components": [launcher]}))
        (folder / "local/study_runtime.yaml").write_text("format_version: 2\nstudies: {}\n")

    def effective(self, name: str) -> Path:
        return self.folder / "local" / name


@pytest.mark.parametrize("runtime", LAUNCHERS.values())
@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["x"], r"resources.json: has a launcher whose args are \['x'\], no JSON object"),
        ("x", "args are 'x', no JSON object"),
        ({"default_job_env": ["x"]}, r"default_job_env are \['x'\], no JSON object"),
        ({"default_job_container_kwargs": ["x"]}, r"default_job_container_kwargs are \['x'\], no JSON object"),
    ],
)
def test_what_is_no_object_is_said_and_not_read(tmp_path, runtime, arguments, what):
    with pytest.raises(BadFile, match=what):
        Containers.of(FakeKit(tmp_path, runtime, arguments))


@pytest.mark.parametrize("wrong", ["no-new-privileges", ["no-new-privileges", ["x"]], {"no-new-privileges": 1}, 5, ["x"]])
def test_other_security_options_than_hardening_are_refused(tmp_path, wrong):
    kit = FakeKit(tmp_path, "docker", {"default_job_container_kwargs": {"security_opt": wrong}})
    said = "\n".join(map(str, Containers.of(kit).problems()))
    assert f"gives containers security_opt {wrong!r}" in said


@pytest.mark.parametrize("arguments", [None, {}, {"default_job_container_kwargs": {"security_opt": ["no-new-privileges"]}}])
def test_none_and_hardening_are_accepted(tmp_path, arguments):
    """What the kit lacks is said: it names no image, and keeps nothing."""
    problems = Containers.of(FakeKit(tmp_path, "docker", arguments)).problems()
    assert [problem.file.name for problem in problems] == ["study_runtime.yaml"] * 2
