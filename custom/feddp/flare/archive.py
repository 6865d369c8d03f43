"""An app as it arrives, in a zip: what is in it is known by name before a byte is unpacked. FLARE itself has no bounds."""

import io
import stat
import zlib
from collections.abc import Collection, Iterable
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile

from nvflare.lighter.tool_consts import NVFLARE_SIG_FILE, NVFLARE_SUBMITTER_CRT_FILE

from feddp.errors import InputError

LARGEST = 1024 * 1024  # bytes of a site's app, packed or not
MOST = 100  # files in it; one of ours has five, signed
CONFIG = "config"
# what FLARE's console adds in every folder of a job when it signs it
_SIGNATURE = (NVFLARE_SIG_FILE, NVFLARE_SUBMITTER_CRT_FILE)
SIGNATURES = (*_SIGNATURE, *(f"{CONFIG}/{name}" for name in _SIGNATURE))


def read_app(data: bytes, file: str) -> bytes:
    """The one configuration `file` of a site's app.

    Raises:
        InputError: it is too large, no zip, or holds anything else but what signs it; the message names it.
    """
    require_small(data)
    try:
        with ZipFile(io.BytesIO(data)) as archive:
            infos = archive.infolist()
            require_files("the app", [info.filename for info in infos if info.filename != f"{CONFIG}/"], [file])
            for info in infos:
                kind = stat.S_IFMT(info.external_attr >> 16)
                plain = kind in (0, stat.S_IFDIR if info.is_dir() else stat.S_IFREG)
                if not plain or info.flag_bits & 1 or info.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
                    raise InputError(f"the app holds {info.filename!r}, which is no plain file; export it with `feddp job`")
            with archive.open(file) as packed:  # `read` unpacks all that is there before it cuts it to what the directory says
                return packed.read(LARGEST)
    except (BadZipFile, zlib.error, EOFError, OSError, ValueError, NotImplementedError) as error:
        raise _unreadable(error) from None


def require_small(data: Any) -> None:
    """InputError for what is no zip, or a larger one than any app of ours, packed or unpacked, in bytes or in files.

    The gate asks this too: FLARE unpacks an app before it asks whoever deploys it.
    """
    if not isinstance(data, bytes | bytearray):
        raise InputError("the app is no zip; submit the job again")
    if len(data) > LARGEST:
        raise InputError(f"the app has {len(data)} bytes, and at most {LARGEST} are read; export the job with `feddp job`")
    try:
        with ZipFile(io.BytesIO(data)) as archive:
            infos = archive.infolist()
    except (BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise _unreadable(error) from None
    if (total := sum(info.file_size for info in infos)) > LARGEST:
        raise InputError(f"the app unpacks to {total} bytes, and at most {LARGEST} are read")
    if len(infos) > MOST:
        raise InputError(f"the app holds {len(infos)} files, and at most {MOST} are read")


def _unreadable(error: Exception) -> InputError:
    return InputError(f"the app is no zip that can be read ({error}); submit the job again")


def require_files(what: str, found: Iterable[str], wanted: Collection[str]) -> None:
    """InputError where files are not exactly those wanted, and FLARE's signatures of them."""
    files = list(found)
    for name in files:
        if name not in wanted and name not in SIGNATURES:
            raise InputError(f"{what} holds {name[:200]!r}, which no job of ours has; export the job with `feddp job`")
    if twice := [name for name in files if files.count(name) > 1]:
        raise InputError(f"{what} holds {twice[0]!r} twice; export the job with `feddp job`")
    if missing := sorted(set(wanted) - set(files)):
        raise InputError(f"{what} lacks {missing[0]}; export the job with `feddp job`")
