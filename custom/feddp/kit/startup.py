"""Checks that startup/ of a kit holds exactly the files that FLARE's templates give for this participant.

No hashes are stored: provisioning adds no files to startup/, so the check renders every file from the installed FLARE and the
participant's certificate, and compares the texts. The root anchors certificate and key (`sealing.kit_certificates`), its
fingerprint the root. Only the certificate that the server shows confirms the server's address.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from cryptography import x509
from cryptography.x509.oid import NameOID
from nvflare.tool.deploy import docker_deploy
from nvflare.tool.deploy.deploy_common import DOCKER_START_SH, WORKSPACE_MOUNT_PATH, KitInfo

from feddp.errors import BadFile, Problem
from feddp.kit.containers import runtime
from feddp.kit.templates import Section, deviations, rendered, shape
from feddp.limits import JSON_BYTES, PEM_BYTES
from feddp.reading import read
from feddp.sealing.kit import ADMIN, AGAIN, CLIENT, SERVER, Kit, read_json

CONFIGURATION = {SERVER: Section.FED_SERVER, CLIENT: Section.FED_CLIENT, ADMIN: Section.FED_ADMIN}
SUB_START = "sub_start.sh"  # starts a server or a site, in a loop or once
NOTEBOOK = "system_info.ipynb"
FOLDERS = ("config", "")  # below an app: from project.yml, and the default of `nvflare package`
README = "readme.txt"  # no program reads it
FLARES = "Restore the kit's file; if another version of FLARE made the kit, have a new kit made with the installed version"
_IMAGE = re.compile(r'^DOCKER_IMAGE=\$\{NVFL_P_IMAGE:-"([\w./:@-]+)"\}$', re.MULTILINE)
_NETWORK = re.compile(r'^NETWORK_NAME="([\w.-]+)"$', re.MULTILINE)


def startup_problems(kit: Kit) -> list[Problem]:
    """Returns every file of startup/ that is not part of a kit or differs from FLARE's. Requires a valid certificate."""
    problems = [Problem(kit.configuration, what, AGAIN) for what in _configuration(kit)] + missing(kit)
    scripts = _scripts(kit)
    ours = {kit.configuration, kit.certificate, kit.key, kit.root, kit.configuration.with_name(README)}
    for path in sorted((kit.folder / "startup").iterdir()):
        if path.name in scripts:
            problems += _changed(path, scripts[path.name])
        elif path.name == DOCKER_START_SH and kit.kind != ADMIN:
            problems += _changed(path, _docker(kit, _text(path)))
        elif path not in ours:
            problems.append(Problem(path, "is not a file of a kit", "Remove it from startup/, from which FLARE reads"))
    return problems


def missing(kit: Kit) -> list[Problem]:
    """Returns FLARE's script that starts a server or a site, if it is missing and no container takes its place."""
    path = kit.folder / "startup" / SUB_START
    with suppress(BadFile):  # of resources.json, which has a check of its own
        if kit.kind != ADMIN and not path.is_file() and runtime(kit) is None:
            return [Problem(path, "is missing", AGAIN)]
    return []


def _text(path: Path) -> str:
    return read(path, JSON_BYTES).decode("utf-8", errors="replace")


def _changed(path: Path, allowed: set[str]) -> list[Problem]:
    if _text(path) in allowed:
        return []
    return [Problem(path, "differs from the script of FLARE's templates", FLARES)]


def _configuration(kit: Kit) -> Iterator[str]:
    """Yields deviations of fed_*.json from FLARE's template: other key or root files, components, relays, clear text."""
    content = read_json(kit.configuration)
    yield from deviations(content, shape(CONFIGURATION[kit.kind]), exact=True)
    part = content["admin"] if kit.kind == ADMIN else content["servers"][0] if kit.kind == SERVER else content.get("client")
    security = part.get("connection_security") if isinstance(part, dict) else None
    if security != "mtls":
        yield f"has connection_security {security!r}; a kit has 'mtls'"


def _scripts(kit: Kit) -> dict[str, set[str]]:
    """Returns {script: its allowed texts}."""
    if kit.kind == ADMIN:
        words = {"admin_name": kit.name}
        return {"fl_admin.sh": {rendered(Section.FL_ADMIN_SH, {})}, NOTEBOOK: {rendered(Section.ADM_NOTEBOOK, words)}}
    server = kit.kind == SERVER
    words = {
        "type": kit.kind,
        "app_name": f"{kit.kind}_train",
        "cln_uid": "" if server else f"uid={kit.name}",
        "org_name": _organisation(kit),
    }
    return {
        "start.sh": {rendered(Section.START_SERVER_SH if server else Section.START_CLIENT_SH, {})},
        SUB_START: {rendered(Section.SUB_START_SH, words | {"config_folder": folder}) for folder in FOLDERS},
        "stop_fl.sh": {rendered(Section.STOP_FL_SH, {})},
    }


def _docker(kit: Kit, script: str) -> set[str]:
    """Returns the text that `nvflare deploy prepare` writes for the image and the network named in the script."""
    image, network = _IMAGE.search(script), _NETWORK.search(script)
    if image is None or network is None:
        return set()
    server = read_json(kit.configuration)["servers"][0]
    learn, admin = kit.server[1], server.get("admin_port")
    ports = dict.fromkeys((learn, admin)) if kit.kind == SERVER else ()
    info = KitInfo(kit.folder, kit.kind, kit.name, _organisation(kit), learn, admin)
    words = {
        "ROLE_LABEL": kit.kind,
        "SITE_NAME": kit.name,
        "DOCKER_IMAGE": f'"{image[1]}"',
        "NETWORK_NAME": f'"{network[1]}"',
        "CONTAINER_NAME": kit.name,
        "NETWORK_ALIAS": "    --network-alias server \\\n" if kit.kind == SERVER else "",
        "WORKSPACE_MOUNT_PATH": WORKSPACE_MOUNT_PATH,
        "PUBLISH_PORTS": "".join(f"    -p {port}:{port} \\\n" for port in ports),
        "PARENT_COMMAND": docker_deploy._docker_parent_command(info),
    }
    template = docker_deploy.DOCKER_START_TEMPLATE.read_text(encoding="utf-8")
    return {re.sub(r"@@NVFLARE_([A-Z_]+)@@", lambda token: words[token[1]], template)}


def _organisation(kit: Kit) -> str:
    """Returns the organisation in the certificate, which the root signed."""
    subject = x509.load_pem_x509_certificate(read(kit.certificate, PEM_BYTES)).subject
    named = subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)
    return str(named[0].value) if named else ""
