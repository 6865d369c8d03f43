"""Reads an app from its zip. All names and sizes are checked before anything is unpacked; FLARE itself sets no limits."""

import io
import stat
import zlib
from collections.abc import Collection, Iterable
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile

from nvflare.lighter.tool_consts import NVFLARE_SIG_FILE, NVFLARE_SUBMITTER_CRT_FILE

from feddp.errors import InputError

LARGEST = 1024 * 1024  # bytes of a site's app, packed or unpacked
MOST = 100  # files in it; our signed apps have five
CONFIG = "config"
# files that FLARE's console adds to every folder of a job when it signs the job
_SIGNATURE = (NVFLARE_SIG_FILE, NVFLARE_SUBMITTER_CRT_FILE)
SIGNATURES = (*_SIGNATURE, *(f"{CONFIG}/{name}" for name in _SIGNATURE))


def read_app(data: bytes, file: str) -> bytes:
    """Returns the bytes of the configuration `file` of a site's app.

    Raises:
        InputError: the app is too large, not a zip, or holds other files than this one and its signatures; names the file.
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
                    raise InputError(f"the app holds {info.filename!r}, which is not a plain file; export it with `feddp job`")
            with archive.open(file) as packed:  # `archive.read` would unpack all data before it applies the declared size
                return packed.read(LARGEST)
    except (BadZipFile, zlib.error, EOFError, OSError, ValueError, NotImplementedError) as error:
        raise _unreadable(error) from None


def require_small(data: Any) -> None:
    """Raises InputError if `data` is not a zip, or is larger than any of our apps, packed or unpacked, in bytes or in files.

    The gate calls it too, because FLARE unpacks an app before it calls the deployer.
    """
    if not isinstance(data, bytes | bytearray):
        raise InputError("the app is not a zip; submit the job again")
    if len(data) > LARGEST:
        raise InputError(f"the app has {len(data)} bytes; the limit is {LARGEST}; export the job with `feddp job`")
    try:
        with ZipFile(io.BytesIO(data)) as archive:
            infos = archive.infolist()
    except (BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise _unreadable(error) from None
    if (total := sum(info.file_size for info in infos)) > LARGEST:
        raise InputError(f"the app unpacks to {total} bytes; the limit is {LARGEST}; export the job with `feddp job`")
    if len(infos) > MOST:
        raise InputError(f"the app holds {len(infos)} files; the limit is {MOST}; export the job with `feddp job`")


def _unreadable(error: Exception) -> InputError:
    return InputError(f"the app is not a readable zip ({error}); submit the job again")


def require_files(what: str, names: Iterable[str], wanted: Collection[str]) -> None:
    """Raises InputError if the files are not exactly the wanted ones and FLARE's signatures."""
    files = list(names)
    for name in files:
        if name not in wanted and name not in SIGNATURES:
            raise InputError(f"{what} holds {name[:200]!r}, which no exported job has; export the job with `feddp job`")
    if twice := [name for name in files if files.count(name) > 1]:
        raise InputError(f"{what} holds {twice[0]!r} twice; export the job with `feddp job`")
    if missing := sorted(set(wanted) - set(files)):
        raise InputError(f"{what} lacks {missing[0]}; export the job with `feddp job`")
