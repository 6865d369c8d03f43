"""Forbids files in FLARE's messages.

FLARE's `Datum` may name a file. A receiver builds the datum when it decodes a message; if it sends the datum back, as a cookie
or a task's id, it sends the content of its own file. A received file is written to disk before any check.
"""

from typing import Any

from nvflare.fuel.utils.class_loader import get_class_name
from nvflare.fuel.utils.fobs import fobs, lobs
from nvflare.fuel.utils.fobs.datum import Datum, DatumManager, DatumType
from nvflare.fuel.utils.fobs.decomposer import DataClassDecomposer


class _NoDatum(DataClassDecomposer):
    """Replaces FLARE's decomposer, which builds a datum from any message."""

    def __init__(self) -> None:
        super().__init__(Datum)

    def recompose(self, data: Any, manager: Any = None) -> Any:
        raise ValueError("a message may not contain a datum")


def no_files() -> None:
    """Makes this process refuse files in messages, sent or received. Large texts and bytes still travel in pieces."""
    add = DatumManager.add_datum
    if holds_no_files():
        return

    def added(manager: DatumManager, datum: Datum) -> None:
        if type(datum) is not Datum or datum.datum_type not in (DatumType.TEXT, DatumType.BLOB):
            raise ValueError("a message may not send a file")
        add(manager, datum)

    def refused() -> str:
        raise ValueError("a message may not bring a file")

    vars(added)["no_files"] = True
    DatumManager.add_datum, lobs.get_datum_dir = added, refused
    fobs._decomposers[get_class_name(Datum)] = _NoDatum()


def holds_no_files() -> bool:
    """Whether `no_files` is in force in this process."""
    return bool(getattr(DatumManager.add_datum, "no_files", False))
