"""Reads a zip of unknown origin file by file, without trust in its directory and without unpacking to disk."""

import io
import zipfile
from pathlib import Path
from typing import IO

from feddp.errors import BadFile, InputError, Problem
from feddp.limits import ARCHIVE_BYTES, ARCHIVE_DIRECTORY, ARCHIVE_FILES, ARCHIVE_RATIO
from feddp.reading import amount, opened, told

# with other compressions, one read can return any number of bytes
_PACKED = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
_ENCRYPTED = 0x1
AGAIN = "Download it again"


class Archive:
    """The files of a zip by name, without its folders."""

    def __init__(self, path: Path):
        """Opens the zip; raises InputError if it is not readable, or has too many or, in total, too large files."""
        self.path = path
        stream = _Careful(opened(path, ARCHIVE_BYTES).detach())
        try:
            self._zip = zipfile.ZipFile(stream)
        except Exception as error:  # the file may hold any bytes, and zipfile then raises many kinds of errors
            stream.close()
            raise BadFile(Problem(path, f"is not a readable zip ({told(error)})", AGAIN)) from None
        self._files = {info.filename: info for info in self._zip.infolist() if not info.is_dir()}
        if len(self._files) > ARCHIVE_FILES:
            raise InputError(f"{path} has {len(self._files)} files; the limit is {ARCHIVE_FILES}. Give a smaller set.")
        together = sum(info.file_size for info in self._files.values())
        if together > min(ARCHIVE_BYTES, ARCHIVE_RATIO * path.stat().st_size):
            raise InputError(f"{path}: unpacked it has {amount(together)}, more than a zip of its size can hold. {AGAIN}.")

    @property
    def names(self) -> list[str]:
        return list(self._files)

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """{file: (bytes, compressed bytes)}."""
        return {name: (info.file_size, info.compress_size) for name, info in self._files.items()}

    def close(self) -> None:
        self._zip.close()

    def open(self, name: str, most: int) -> IO[bytes]:
        """Opens the file `name`, of at most `most` bytes. The directory may give a false size: read the file in parts.

        Raises:
            BadFile: the file is larger, encrypted, or compressed in another way than by deflate.
        """
        info = self._files[name]
        wrong = None
        if info.flag_bits & _ENCRYPTED or info.compress_type not in _PACKED:
            wrong = Problem(self.path / name, "is encrypted, or not compressed by deflate", "Unpack it, give the folder")
        elif info.file_size > most:
            wrong = Problem(self.path / name, f"has {info.file_size} bytes; the limit is {amount(most)}", "Make it smaller")
        elif info.file_size > ARCHIVE_RATIO * max(info.compress_size, 1):
            wrong = Problem(self.path / name, "has a size that its compressed bytes cannot reach", AGAIN)
        if wrong:
            raise BadFile(wrong)
        return self._zip.open(info)


class _Careful(io.BufferedReader):
    """Bounds the directory's size: zipfile reads the directory at once, with the length given in the zip's last bytes."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > ARCHIVE_DIRECTORY:
            raise zipfile.BadZipFile(f"its directory has {size} bytes; the limit is {amount(ARCHIVE_DIRECTORY)}")
        return super().read(size)
