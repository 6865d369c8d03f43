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
# the tool itself validates what it writes, with this function. Its imports take seconds, so it is asked in that process
CONTROL = """
import atexit, sys

def control():
    if "cyclonedx.validation" in sys.modules:  # not in the interpreters that the tool starts
        from cyclonedx.schema import OutputFormat, SchemaVersion
        from cyclonedx.validation import make_schemabased_validator
        valid = make_schemabased_validator(OutputFormat.JSON, SchemaVersion.V1_6).validate_str
        bom = '{"bomFormat": "CycloneDX"%s}'
        address = bom % ', "specVersion": "1.6", "externalReferences": [{"type": "website", "url": "%s"}]'
        asked = bom % "", address % "http://[x", address % "https://example.org"
        open("control", "w").write(" ".join("refused" if valid(each) else "valid" for each in asked))

atexit.register(control)
"""
# What the tool takes, if it is there, in place of a parser of addresses that takes 12 seconds to make: stricter, without
# letters of other alphabets
ADDRESSES = """
from rfc3986_validator import validate_rfc3986

def parse(text, rule):
    if not validate_rfc3986(text, rule=rule.replace("IRI", "URI")):
        raise ValueError(text)
    return True
"""


def test_the_environment_is_listed_without_a_network(tmp_path):
    """It is valid CycloneDX, of feddp, and has every package of requirements.txt at its version. The tool checks addresses by
    ADDRESSES, which a reader's does not have."""
    make, install, tell = commands_for("test_sbom", "docs/how-to/dependencies.md")
    for name in ("pyproject.toml", "provisioning/sbom.lock"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "offline").mkdir()
    (tmp_path / "offline/sitecustomize.py").write_text(OFFLINE + CONTROL)
    (tmp_path / "offline/rfc3987.py").write_text(ADDRESSES)

    def shell(*words, **env):
        done = subprocess.run(words, cwd=tmp_path, env=os.environ | env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stderr

    shell("bash", "-c", make)
    shell("bash", "-c", install, PIP_NO_COMPILE="no")  # as --no-compile: what the tool imports is compiled then
    assert "Validation skipped" not in shell("bash", "-c", tell, PYTHONPATH=str(tmp_path / "offline"))
    assert (tmp_path / "control").read_text() == "refused refused valid"
    sbom = json.loads((tmp_path / "sbom.json").read_text(encoding="utf-8"))
    assert sbom["bomFormat"] == "CycloneDX"
    assert sbom["metadata"]["component"]["name"] == "feddp"
    listed = {canonicalize_name(component["name"]): component["version"] for component in sbom["components"]}
    wanted = pinned(f"{sys.version_info.major}.{sys.version_info.minor}")
    assert {name: listed.get(name) for name in wanted} == wanted
