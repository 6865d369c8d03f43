"""What FLARE's messages may not hold: a file. Its `Datum` names one, whoever decodes a message builds it, and whoever sends it
back (a cookie, a task's id) sends the file's content; one that comes is written to disk before anything is asked."""

from typing import Any

from nvflare.fuel.utils.class_loader import get_class_name
from nvflare.fuel.utils.fobs import fobs, lobs
from nvflare.fuel.utils.fobs.datum import Datum, DatumManager, DatumType
from nvflare.fuel.utils.fobs.decomposer import DataClassDecomposer


class _NoDatum(DataClassDecomposer):
    """In place of FLARE's, which builds a datum from whatever a message says."""

    def __init__(self) -> None:
        super().__init__(Datum)

    def recompose(self, data: Any, manager: Any = None) -> Any:
        raise ValueError("a datum comes beside a message, not in it")


def no_files() -> None:
    """From now on no message that this process sends or receives holds a file. Large texts and bytes still go in pieces."""
    add = DatumManager.add_datum
    if holds_no_files():
        return

    def added(manager: DatumManager, datum: Datum) -> None:
        if type(datum) is not Datum or datum.datum_type not in (DatumType.TEXT, DatumType.BLOB):
            raise ValueError("no file goes with a message")
        add(manager, datum)

    def refused() -> str:
        raise ValueError("no file comes with a message")

    vars(added)["no_files"] = True
    DatumManager.add_datum, lobs.get_datum_dir = added, refused
    fobs._decomposers[get_class_name(Datum)] = _NoDatum()


def holds_no_files() -> bool:
    """Whether `no_files` is in force in this process."""
    return bool(getattr(DatumManager.add_datum, "no_files", False))
