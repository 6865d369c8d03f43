"""startup/ of a kit is what FLARE's templates give for this participant: nothing else is in it, and no script was changed.

Both ways of provisioning write nothing of their own there, so no hashes need be kept or signed: every file is made again from
the installed FLARE and from what the certificate says of the participant, and compared to the letter. What the consortium alone
can say is anchored elsewhere: certificate and key by the root (`kit.certificates`), the root by its fingerprint. The server's
address is anchored by nothing but the certificate that is shown there.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from cryptography import x509
from cryptography.x509.oid import NameOID
from nvflare.tool.deploy import docker_deploy
from nvflare.tool.deploy.deploy_common import DOCKER_START_SH, WORKSPACE_MOUNT_PATH, KitInfo

from feddp.errors import Problem
from feddp.kit.templates import Section, deviations, rendered, shape
from feddp.limits import JSON_BYTES
from feddp.reading import read
from feddp.sealing.kit import ADMIN, AGAIN, CLIENT, SERVER, Kit, read_json

CONFIGURATION = {SERVER: Section.FED_SERVER, CLIENT: Section.FED_CLIENT, ADMIN: Section.FED_ADMIN}
NOTEBOOK = "system_info.ipynb"
FOLDERS = ("config", "")  # below an app: as project.yml says, and as `nvflare package` takes it where nobody says
README = "readme.txt"  # nothing reads it
FLARES = "Put back the kit's file; if the kit is of another version of FLARE than is installed here, have it made anew"
_IMAGE = re.compile(r'^DOCKER_IMAGE=\$\{NVFL_P_IMAGE:-"([\w./:@-]+)"\}$', re.MULTILINE)
_NETWORK = re.compile(r'^NETWORK_NAME="([\w.-]+)"$', re.MULTILINE)


def startup_problems(kit: Kit) -> list[Problem]:
    """Every file of startup/ that is not a kit's, or not as FLARE writes it, where nothing is wrong with the certificate."""
    problems = [Problem(kit.configuration, what, AGAIN) for what in _configuration(kit)]
    scripts = _scripts(kit)
    ours = {kit.configuration, kit.certificate, kit.key, kit.root, kit.configuration.with_name(README)}
    for path in sorted((kit.folder / "startup").iterdir()):
        if path.name in scripts:
            problems += _changed(path, scripts[path.name])
        elif path.name == DOCKER_START_SH and kit.kind != ADMIN:
            problems += _changed(path, _docker(kit, _text(path)))
        elif path not in ours:
            problems.append(Problem(path, "is no file of a kit", "Take it out of startup/, from which FLARE reads"))
    return problems


def _text(path: Path) -> str:
    return read(path, JSON_BYTES).decode("utf-8", errors="replace")


def _changed(path: Path, allowed: set[str]) -> list[Problem]:
    if _text(path) in allowed:
        return []
    return [Problem(path, "is not the script that FLARE's templates give", FLARES)]


def _configuration(kit: Kit) -> Iterator[str]:
    """What of fed_*.json FLARE's template does not say: other files for key and root, components, relays, clear text."""
    said = read_json(kit.configuration)
    yield from deviations(said, shape(CONFIGURATION[kit.kind]), exact=True)
    part = said["admin"] if kit.kind == ADMIN else said["servers"][0] if kit.kind == SERVER else said.get("client")
    security = part.get("connection_security") if isinstance(part, dict) else None
    if security != "mtls":
        yield f"has connection_security {security!r}, and a kit mtls"


def _scripts(kit: Kit) -> dict[str, set[str]]:
    """What each script may hold."""
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
        "sub_start.sh": {rendered(Section.SUB_START_SH, words | {"config_folder": folder}) for folder in FOLDERS},
        "stop_fl.sh": {rendered(Section.STOP_FL_SH, {})},
    }


def _docker(kit: Kit, script: str) -> set[str]:
    """What `nvflare deploy prepare` writes for the image and the network that the script names."""
    image, network = _IMAGE.search(script), _NETWORK.search(script)
    if image is None or network is None:
        return set()
    said = read_json(kit.configuration)["servers"][0]
    learn, admin = kit.server[1], said.get("admin_port")
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
    """As the certificate has it, which the root signed."""
    subject = x509.load_pem_x509_certificate(kit.certificate.read_bytes()).subject
    named = subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)
    return str(named[0].value) if named else ""
