"""What a startup kit says of itself: whose it is, of which project, and where the server listens."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feddp.errors import BadFile, InputError, Problem
from feddp.limits import JSON_BYTES
from feddp.reading import read

SERVER, CLIENT, ADMIN = "server", "client", "admin"  # the kinds of a kit, as FLARE names its files
KINDS = (SERVER, CLIENT, ADMIN)
AGAIN = "Ask the consortium for the kit anew"


@dataclass(frozen=True)
class Kit:
    """A folder with `startup/` and `local/`, as `nvflare provision` and `nvflare package` write it.

    `kind` is server, client or admin; `name` the participant's; `server` the host and port it connects to.
    """

    folder: Path
    kind: str
    name: str
    project: str
    server: tuple[str, int]

    @classmethod
    def open(cls, folder: Path) -> "Kit":
        """Reads the kit's own configuration.

        Raises:
            InputError: the folder holds no kit, or its configuration cannot be read.
        """
        found = [kind for kind in KINDS if (folder / "startup" / f"fed_{kind}.json").exists()]
        if len(found) != 1:
            raise InputError(f"{folder} holds no startup kit; name a participant's folder below prod_00")
        path = folder / "startup" / f"fed_{found[0]}.json"
        said = read_json(path)
        try:
            return cls(folder, found[0], *_identity(found[0], said))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise BadFile(Problem(path, f"is not what FLARE wrote ({type(error).__name__}: {error})", AGAIN)) from error

    @property
    def configuration(self) -> Path:
        return self.folder / "startup" / f"fed_{self.kind}.json"

    @property
    def root(self) -> Path:
        return self.folder / "startup" / "rootCA.pem"

    @property
    def certificate(self) -> Path:
        return self.folder / "startup" / ("server.crt" if self.kind == SERVER else "client.crt")

    @property
    def key(self) -> Path:
        return self.certificate.with_suffix(".key")

    @property
    def server_identity(self) -> str:
        """The name in the server's certificate, as a site's or a person's kit says it.

        Raises:
            InputError: the kit does not say it.
        """
        try:
            said = read_json(self.configuration)
            return str(said["admin"]["server_identity"] if self.kind == ADMIN else said["servers"][0]["identity"])
        except (KeyError, IndexError, TypeError) as error:
            raise BadFile(Problem(self.configuration, "does not say the server's identity", AGAIN)) from error

    def effective(self, name: str) -> Path:
        """The file of `local/` that FLARE obeys: `name` where the hospital has written one, else what was provisioned."""
        own = self.folder / "local" / name
        return own if own.exists() else own.with_name(f"{name}.default")


def _identity(kind: str, said: dict[str, Any]) -> tuple[str, str, tuple[str, int]]:
    """Name, project, server."""
    if kind == ADMIN:
        admin = said["admin"]
        return admin["username"], admin["project_name"], (admin["host"], int(admin["port"]))
    first = said["servers"][0]
    host, port = first["service"]["target"].rsplit(":", 1)
    # a client behind relays is called after them: relay.site
    name = first["admin_server"] if kind == SERVER else said["client"]["fqsn"].rsplit(".", 1)[-1]
    return name, first["name"], (host, int(port))


def components(path: Path) -> list[dict[str, Any]]:
    """The components that a file of resources has FLARE build. BadFile where it cannot be read."""
    listed = read_json(path).get("components")
    return [component for component in listed if isinstance(component, dict)] if isinstance(listed, list) else []


def read_json(path: Path) -> dict[str, Any]:
    """A file's JSON object.

    Raises:
        BadFile: it is not there, or holds something else.
    """
    remedy = AGAIN if path.parent.name == "startup" else "Correct it, or put back the file as it was provisioned"
    try:
        content = json.loads(read(path, JSON_BYTES))
    except FileNotFoundError:
        raise BadFile(Problem(path, "is missing", remedy)) from None
    except (OSError, ValueError, RecursionError) as error:
        raise BadFile(Problem(path, f"cannot be read ({error})", remedy)) from error
    if not isinstance(content, dict):
        raise BadFile(Problem(path, "holds no JSON object", remedy))
    return content
