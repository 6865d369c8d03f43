"""A zip from anywhere, read file by file: what its directory says is not believed, and nothing is unpacked to disk."""

import io
import zipfile
from pathlib import Path
from typing import IO

from feddp.errors import BadFile, InputError, Problem
from feddp.limits import ARCHIVE_BYTES, ARCHIVE_DIRECTORY, ARCHIVE_FILES, ARCHIVE_RATIO
from feddp.reading import amount, opened

# others unpack without a bound on what one read returns
_PACKED = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
_ENCRYPTED = 0x1
AGAIN = "Download it again"


class Archive:
    """The files of a zip by name, those of its folders left out."""

    def __init__(self, path: Path):
        """InputError where `path` is no readable zip, or its files are too many or too large together."""
        self.path = path
        stream = _Careful(opened(path, ARCHIVE_BYTES).detach())
        try:
            self._zip = zipfile.ZipFile(stream)
        except Exception as error:  # the file may hold any bytes: zipfile fails in as many ways
            stream.close()
            raise BadFile(Problem(path, f"is not a readable zip ({error})", AGAIN)) from None
        self._files = {info.filename: info for info in self._zip.infolist() if not info.is_dir()}
        if len(self._files) > ARCHIVE_FILES:
            raise InputError(f"{path}: it holds {len(self._files)} files, and {ARCHIVE_FILES} is the most. Give a smaller set.")
        together = sum(info.file_size for info in self._files.values())
        if together > min(ARCHIVE_BYTES, ARCHIVE_RATIO * path.stat().st_size):
            raise InputError(f"{path}: unpacked it has {amount(together)}, more than so small a zip can hold. {AGAIN}.")

    @property
    def names(self) -> list[str]:
        return list(self._files)

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """Of every file: bytes, and bytes as packed."""
        return {name: (info.file_size, info.compress_size) for name, info in self._files.items()}

    def close(self) -> None:
        self._zip.close()

    def open(self, name: str, most: int) -> IO[bytes]:
        """The file `name`, of at most `most` bytes. Its directory's entry may lie: read it bit by bit.

        Raises:
            BadFile: it is larger, or packed in a way that is not read.
        """
        info = self._files[name]
        wrong = None
        if info.flag_bits & _ENCRYPTED or info.compress_type not in _PACKED:
            wrong = Problem(self.path / name, "is encrypted, or packed otherwise than by deflate", "Unpack it, give the folder")
        elif info.file_size > most:
            wrong = Problem(self.path / name, f"has {info.file_size} bytes, and {amount(most)} is the most", "Make it smaller")
        elif info.file_size > ARCHIVE_RATIO * max(info.compress_size, 1):
            wrong = Problem(self.path / name, "says that it is larger than its packed bytes can be", AGAIN)
        if wrong:
            raise BadFile(wrong)
        return self._zip.open(info)


class _Careful(io.BufferedReader):
    """zipfile reads a zip's directory at once, however long the zip's last bytes say that it is."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > ARCHIVE_DIRECTORY:
            raise zipfile.BadZipFile(f"its directory has {size} bytes, and {amount(ARCHIVE_DIRECTORY)} is the most")
        return super().read(size)
