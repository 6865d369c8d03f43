"""A kit whose own processes would connect without mutual TLS does not start: later, each of its jobs would fail at its gate."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvflare.lighter.constants import ProvFileName

from feddp.errors import BadFile, Problem
from feddp.flare.configuration import INTERNAL
from feddp.lean import PARENTS
from feddp.reading import shown
from feddp.sealing.kit import read_json


def own_connections_problem(internal: Any) -> str:
    """Returns what is wrong with `internal` of a local/comm_config.json, wherever the participant's processes are; "" if
    nothing is."""
    resources = internal.get("resources") if isinstance(internal, Mapping) else None
    security = resources.get("connection_security") if isinstance(resources, Mapping) else None
    scheme = internal.get("scheme") if isinstance(internal, Mapping) else None
    if (scheme, security) == (INTERNAL["scheme"], INTERNAL["resources"]["connection_security"]):
        return ""
    how = shown(f"{scheme} with connection_security {security}")
    return f"lets other users of this machine claim to be its own processes (`internal` is {how})"


def require_own_connections() -> None:
    """Reads local/comm_config.json in the parent process of a kit, which runs in the kit's folder. Elsewhere it does nothing.

    A job's process in a container runs in another folder, and its connection is judged where it is made (`neighbours`). FLARE's
    own reader is not asked: it keeps what it finds, and finds nothing before FLARE has named it the folder.

    Raises:
        SystemExit: with code 2; the reason and the remedy are on stderr. FLARE reports any other error as one of its own.
    """
    if set(PARENTS).isdisjoint(sys.orig_argv):
        return
    path = Path("local", ProvFileName.COMM_CONFIG).absolute()
    try:
        if why := own_connections_problem(read_json(path).get("internal") if path.exists() else None):
            remedy = f"Write {json.dumps({'internal': INTERNAL})[1:-1]} into it, or prepare a kit for containers again"
            raise BadFile(Problem(path, why, remedy))
    except BadFile as bad:
        from feddp.terminal import note  # not above: it loads rich, which no process needs that starts

        note(f"{bad} The kit does not start; `feddp kit check` checks all of it.")
        sys.exit(2)
