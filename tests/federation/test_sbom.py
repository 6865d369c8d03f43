"""The docs' commands that list what is installed, in CycloneDX's format."""

import json
import os
import subprocess
import sys

import pytest
from packaging.utils import canonicalize_name

from support import ROOT
from support.docs_pages import commands_for
from support.locks import pinned

pytestmark = pytest.mark.tools

OFFLINE = "import socket\n\ndef refuse(*_):\n    raise OSError('offline')\n\nsocket.socket.connect = refuse\n"
# the tool itself validates what it writes, with this function, which takes 12 seconds
CONTROL = """
from cyclonedx.schema import OutputFormat, SchemaVersion
from cyclonedx.validation import make_schemabased_validator
assert make_schemabased_validator(OutputFormat.JSON, SchemaVersion.V1_6).validate_str('{"bomFormat": "CycloneDX"}') is not None
"""


def test_the_environment_is_listed_without_a_network(tmp_path):
    """It is valid CycloneDX, of feddp, and has every package of requirements.txt at its version."""
    make, install, tell = commands_for("test_sbom", "docs/how-to/dependencies.md")
    for name in ("pyproject.toml", "provisioning/sbom.lock"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "offline").mkdir()
    (tmp_path / "offline/sitecustomize.py").write_text(OFFLINE)

    def shell(*words, **env):
        done = subprocess.run(words, cwd=tmp_path, env=os.environ | env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stderr

    for command in (make, install):
        shell("bash", "-c", command)
    assert "Validation skipped" not in shell("bash", "-c", tell, PYTHONPATH=str(tmp_path / "offline"))
    shell("sbom-tool/bin/python", "-c", CONTROL)
    sbom = json.loads((tmp_path / "sbom.json").read_text(encoding="utf-8"))
    assert sbom["bomFormat"] == "CycloneDX"
    assert sbom["metadata"]["component"]["name"] == "feddp"
    listed = {canonicalize_name(component["name"]): component["version"] for component in sbom["components"]}
    wanted = pinned(f"{sys.version_info.major}.{sys.version_info.minor}")
    assert {name: listed.get(name) for name in wanted} == wanted
