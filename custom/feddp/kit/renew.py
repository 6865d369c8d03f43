"""Renewal with FLARE's central provisioning, which stores every issued certificate and has no command to renew one."""

import json
from pathlib import Path

from feddp.errors import InputError
from feddp.files import write_text
from feddp.sealing.kit import read_json

ROOT = {"root_cert", "root_pri_key"}  # the keys in FLARE's cert.json that are not participants


def forget(state: Path, name: str) -> None:
    """Removes a participant's certificate and key from FLARE's cert.json; the next `nvflare provision` makes new ones.

    Raises:
        InputError: there is no such file, or no such participant in it.
    """
    kept = read_json(state)
    known = sorted(kept.keys() - ROOT)
    if name not in known:
        raise InputError(f"{state} has no certificate of {name}; it has those of {', '.join(known)}")
    del kept[name]
    write_text(state, json.dumps(kept), mode=0o600)  # the root's private key is in it
