"""The configuration of a startup kit: its participant, its project and the server's address."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509

from feddp.errors import BadFile, InputError, Problem
from feddp.limits import JSON_BYTES, PEM_BYTES
from feddp.reading import is_name, read, short, shown
from feddp.sealing.certificates import name_of

SERVER, CLIENT, ADMIN = "server", "client", "admin"  # the kinds of kits, as in the names of FLARE's files
KINDS = (SERVER, CLIENT, ADMIN)
AGAIN = "Ask the consortium for the kit anew"


@dataclass(frozen=True)
class Kit:
    """A folder with `startup/` and `local/`, written by `nvflare provision` or `nvflare package`.

    `kind` is server, client or admin; `name` is the participant's name; `server` is the host and port to which it connects.
    """

    folder: Path
    kind: str
    name: str
    project: str
    server: tuple[str, int]

    @classmethod
    def open(cls, folder: Path) -> "Kit":
        """Reads the kit's configuration.

        Raises:
            InputError: the folder holds no kit, or its configuration cannot be read.
        """
        try:
            kinds = [kind for kind in KINDS if (folder / "startup" / f"fed_{kind}.json").exists()]
        except PermissionError:
            raise InputError(f"{folder} is closed to this user; type this as the user to whom the kit belongs") from None
        if len(kinds) != 1:
            raise InputError(f"{folder} holds no startup kit; name a participant's folder below prod_00")
        path = folder / "startup" / f"fed_{kinds[0]}.json"
        content = read_json(path)
        try:
            if kinds[0] == ADMIN and content["admin"].get("uid_source") == "cert":  # in POC mode
                pem = read(path.parent / "client.crt", PEM_BYTES)
                content["admin"]["username"] = name_of(x509.load_pem_x509_certificate(pem))
            return cls(folder, kinds[0], *_identity(kinds[0], content))
        except (OSError, AttributeError, KeyError, IndexError, TypeError, ValueError, x509.InvalidVersion) as error:
            why = short(f"{type(error).__name__}: {error}")
            raise BadFile(Problem(path, f"is not as FLARE writes it ({why})", AGAIN)) from error

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
        """The name in the server's certificate, from the kit of a site or a person.

        Raises:
            InputError: the kit does not have it.
        """
        try:
            content = read_json(self.configuration)
            return _text(content["admin"]["server_identity"] if self.kind == ADMIN else content["servers"][0]["identity"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise BadFile(Problem(self.configuration, "lacks the server's identity", AGAIN)) from error

    def effective(self, name: str) -> Path:
        """Returns the file of `local/` that FLARE uses: `name` if the site has written it, else the provisioned default."""
        own = self.folder / "local" / name
        return own if own.exists() else own.with_name(f"{name}.default")


def _identity(kind: str, content: dict[str, Any]) -> tuple[str, str, tuple[str, int]]:
    """Returns name, project and server; raises KeyError, IndexError, TypeError or ValueError where one is missing or wrong."""
    if kind == ADMIN:
        admin = content["admin"]
        return _text(admin["username"]), _text(admin["project_name"]), (_text(admin["host"]), _port(admin["port"]))
    first = content["servers"][0]
    host, port = _text(first["service"]["target"]).rsplit(":", 1)
    # the name of a client behind relays starts with theirs: relay.site
    name = first["admin_server"] if kind == SERVER else _text(content["client"]["fqsn"]).rsplit(".", 1)[-1]
    return _text(name), _text(first["name"]), (_text(host), _port(port))


def _text(value: Any) -> str:
    if not is_name(value):
        raise ValueError(f"{shown(value)} is no name")
    return str(value)


def _port(value: Any) -> int:
    # int() reads digits of other scripts, blanks and underscores too
    if isinstance(value, str) and re.fullmatch("[0-9]{1,5}", value):
        value = int(value)
    if type(value) is not int or not 0 < value < 2**16:
        raise ValueError(f"{shown(value)} is no port")
    return value


def components(path: Path) -> list[dict[str, Any]]:
    """Returns the components that FLARE builds from a file of resources; raises BadFile if the file cannot be read."""
    listed = read_json(path).get("components")
    return [component for component in listed if isinstance(component, dict)] if isinstance(listed, list) else []


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file, which FLARE reads as UTF-8 text.

    Raises:
        BadFile: the file is missing, has another encoding, or does not hold a JSON object.
    """
    remedy = AGAIN if path.parent.name == "startup" else "Correct it, or restore the provisioned file"
    try:
        text = read(path, JSON_BYTES).decode("utf-8")  # from bytes, json.loads would read what FLARE does not
        if text.startswith("\N{BYTE ORDER MARK}"):
            raise BadFile(Problem(path, "begins with a byte order mark, which FLARE does not read", "Save it without it"))
        content = json.loads(text)
    except FileNotFoundError:
        raise BadFile(Problem(path, "is missing", remedy)) from None
    except UnicodeDecodeError:
        raise BadFile(Problem(path, "is not UTF-8 text, which FLARE reads alone", "Save it as UTF-8")) from None
    except (OSError, ValueError, RecursionError) as error:
        raise BadFile(Problem(path, f"cannot be read ({error})", remedy)) from error
    if not isinstance(content, dict):
        raise BadFile(Problem(path, "is not a JSON object", remedy))
    return content
