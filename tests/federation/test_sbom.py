"""The docs' command that lists what is installed, in CycloneDX's format."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.utils import canonicalize_name

from support import ROOT
from support.docs_pages import commands_for
from support.locks import pinned

pytestmark = pytest.mark.tools

OFFLINE = "import socket\n\ndef refuse(*_):\n    raise OSError('offline')\n\nsocket.socket.connect = refuse\n"


def test_the_environment_is_listed_without_a_network(tmp_path):
    """It is valid CycloneDX, of feddp, and has every package of requirements.txt at its version."""
    (command,) = commands_for("test_sbom", "docs/how-to/dependencies.md")
    words = shlex.split(command)
    assert words[-1] == ".venv"
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    (tmp_path / "offline").mkdir()
    (tmp_path / "offline/sitecustomize.py").write_text(OFFLINE)
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "offline")}
    tool = Path(sys.executable).parent / words[0]
    done = subprocess.run(
        [str(tool), *words[1:-1], sys.prefix], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "sbom.json").read_text(encoding="utf-8")
    sbom = json.loads(text)
    assert sbom["bomFormat"] == "CycloneDX"
    assert JsonStrictValidator(SchemaVersion.from_version(sbom["specVersion"])).validate_str(text) is None
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str('{"bomFormat": "CycloneDX"}') is not None, "the control"
    assert sbom["metadata"]["component"]["name"] == "feddp"
    listed = {canonicalize_name(component["name"]): component["version"] for component in sbom["components"]}
    wanted = pinned(f"{sys.version_info.major}.{sys.version_info.minor}")
    assert {name: listed.get(name) for name in wanted} == wanted
