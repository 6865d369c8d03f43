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
VALID = """
import json, sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
text = open("sbom.json", encoding="utf-8").read()
said = JsonStrictValidator(SchemaVersion.from_version(json.loads(text)["specVersion"])).validate_str(text)
assert said is None, said
assert JsonStrictValidator(SchemaVersion.V1_6).validate_str('{"bomFormat": "CycloneDX"}') is not None, "the control"
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

    for command in (make, install):
        shell("bash", "-c", command)
    shell("bash", "-c", tell, PYTHONPATH=str(tmp_path / "offline"))
    shell("sbom-tool/bin/python", "-c", VALID)
    sbom = json.loads((tmp_path / "sbom.json").read_text(encoding="utf-8"))
    assert sbom["bomFormat"] == "CycloneDX"
    assert sbom["metadata"]["component"]["name"] == "feddp"
    listed = {canonicalize_name(component["name"]): component["version"] for component in sbom["components"]}
    wanted = pinned(f"{sys.version_info.major}.{sys.version_info.minor}")
    assert {name: listed.get(name) for name in wanted} == wanted
