"""Reads a downloaded data set, a folder or a zip, in place, without unpacking to disk."""

import gzip
import hashlib
import io
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path, PurePosixPath
from tempfile import SpooledTemporaryFile
from typing import IO, Any, cast

import numpy as np
from PIL import Image

from feddp.archive import AGAIN, Archive
from feddp.data.formats.guarded import UNREADABLE, guarded
from feddp.data.pixels import alpha_of, decode, require_drawn, require_shown, scaled
from feddp.errors import BadFile, FedDPError, InputError, Problem
from feddp.limits import ARCHIVE_BYTES, ARCHIVE_FILES, IMAGE_BYTES, IN_MEMORY, MIB, VOXELS
from feddp.reading import amount, opened, told

IMAGES = (".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".tif", ".tiff", ".bmp")
FORMATS = ("PNG", "JPEG", "TIFF", "BMP")


class Source:
    """The files of a folder or zip by name: the source's name and the path below it, separated by /.

    Names start with the source's name, so a user may give a layout's top folder or the folder that contains it.

    Attributes:
        names: of the files.
        voxels: the most that a volume may have.
        unread: {name: what is wrong with it} of what is neither a file nor a folder that is entered, such as a linked folder.
    """

    def __init__(self, path: Path, voxels: int = VOXELS):
        """Lists the files; raises InputError if `path` is neither a folder nor a zip, or has too many files."""
        self.path, self.voxels = Path(path), voxels
        self._zip = None
        wrong: dict[str, str] = {}
        found: Iterable[str]
        if self.path.is_dir():
            top = self.path.resolve()
            below = {f"{top.name}/{name}": what for name, what in islice(_below(top), ARCHIVE_FILES + 1)}
            if len(below) > ARCHIVE_FILES:
                raise InputError(f"{self.path} has more than {ARCHIVE_FILES} files. Give the folder of the data set alone.")
            wrong = {name: what for name, what in below.items() if what}
            found = below.keys() - wrong.keys()
        elif _is_zip(self.path):
            self._zip = Archive(self.path)
            found = (f"{self.path.stem}/{name}" for name in self._zip.names)
        elif not self.path.exists():
            raise InputError(f"{self.path} does not exist. Give the data set as downloaded: a folder or a zip.")
        else:
            raise InputError(f"{self.path}: neither a folder nor a zip. Give the data set as downloaded.")
        # archives of macOS have a hidden file "._name" beside every file
        self.names = frozenset(n for n in found if not _is_hidden(n))
        remedy = "Put a readable copy there, or leave it out"
        self.unread = {n: BadFile(Problem(self.shown(n), wrong[n], remedy)) for n in sorted(wrong) if not _is_hidden(n)}

    def open(self, name: str, most: int) -> IO[bytes]:
        """Opens `name`; read it in parts. Raises BadFile if it has more than `most` bytes or is a link that leads out."""
        below = name.split("/", 1)[1]
        return self._zip.open(below, most) if self._zip else opened(self.path / below, most, within=self.path)

    def read(self, name: str, most: int = IMAGE_BYTES) -> bytes:
        """Returns the bytes of `name`; raises InputError if they are more than `most` or cannot be read."""
        content = self.start(name, most + 1, most)
        if len(content) > most:
            raise InputError(f"{self.path}: {name} has more than {amount(most)}, which is the limit. Make it smaller.")
        return content

    def seekable(self, name: str, most: int) -> IO[bytes]:
        """Opens `name` so that any part of it can be read; that of a zip is unpacked first. Raises as `open`, or if damaged."""
        if not self._zip:
            return self.open(name, most)
        try:
            with self.open(name, most) as stream:
                return settled(iter(lambda: stream.read(MIB), b""), most, self.shown(name))
        except FedDPError:
            raise
        except Exception as error:  # as in `start`
            raise InputError(f"{self.path}: {name} cannot be read ({told(error)}). {AGAIN}.") from None

    def start(self, name: str, count: int, most: int) -> bytes:
        """Returns the first `count` bytes of `name`, fewer at its end; raises InputError as `open`, or if it is damaged."""
        try:
            with self.open(name, most) as stream:
                return read_up_to(stream, count)
        except FedDPError:
            raise
        except Exception as error:  # zipfile raises many kinds of errors for a damaged zip
            raise InputError(f"{self.path}: {name} cannot be read ({told(error)}). {AGAIN}.") from None

    def partner(self, name: str) -> str:
        """Returns the other file of a pair of header (.hdr) and voxels (.img), packed (.gz) or not; "" if there is none."""
        stem, _, kind = name.removesuffix(".gz").rpartition(".")
        packed = name[len(stem) + 1 + len(kind) :]
        other = {"img": "hdr", "hdr": "img", "IMG": "HDR", "HDR": "IMG"}.get(kind)
        beside = f"{stem}.{other}{packed}"
        return beside if other and beside in self.names else ""

    def folder(self, tail: str) -> tuple[str, dict[str, str]]:
        """Returns the folder, at any depth, whose path ends in `tail`, as (path, {stem: name} of its images).

        Returns ("", {}) if there is none, and the first of several that are copies of each other. Raises InputError if there
        are two folders of different content, or two images with one stem.
        """
        folders: dict[str, dict[str, str]] = {}
        for name in sorted(self.names):
            file = PurePosixPath(name)
            if file.suffix.lower() in IMAGES and f"/{file.parent}".endswith(f"/{tail}"):
                stems = folders.setdefault(str(file.parent), {})
                if file.stem in stems:
                    raise InputError(f"{self.path} has both {stems[file.stem]} and {name}. Keep one.")
                stems[file.stem] = name
        first, images = next(iter(folders.items()), ("", {}))
        for copies in folders.values():
            if copies.keys() != images.keys():
                raise InputError(f"{self.path} has {tail} more than once ({', '.join(folders)}). Keep one.")
            for stem, name in copies.items():
                self.require_copy(images[stem], name)
        return first, images

    def require_copy(self, first: str, other: str) -> None:
        """Raises InputError unless two files have the same bytes: some archives hold a data set twice."""
        if first != other and self.digest(first) != self.digest(other):
            raise InputError(f"{self.path} has both {first} and {other}, and they differ. Keep one.")

    def digest(self, name: str) -> bytes:
        """Returns what copies of a file have in common; raises InputError if it cannot be read."""
        found = hashlib.sha256()
        try:
            with self.open(name, ARCHIVE_BYTES) as stream:
                while part := stream.read(MIB):
                    found.update(part)
        except FedDPError:
            raise
        except Exception as error:  # as in `start`
            raise InputError(f"{self.path}: {name} cannot be read ({told(error)}). {AGAIN}.") from None
        return found.digest()

    def rgb(self, name: str) -> np.ndarray:
        """Returns an image as uint8 (H, W, 3); raises InputError if it cannot be decoded, or shows by transparency alone."""
        return self._image(name, "RGB", require_shown)

    def grey(self, name: str) -> np.ndarray:
        """Returns an image as uint8 (H, W), a bilevel one as 0 and 255; raises InputError if it cannot be decoded, or says
        something else by transparency than by its values."""
        return self._image(name, "L", require_drawn)

    def _image(self, name: str, mode: str, require: Callable[[Path, np.ndarray, np.ndarray | None], None]) -> np.ndarray:
        with guarded(self.shown(name), UNREADABLE):
            image = decode(io.BytesIO(self.read(name)), FORMATS, self.shown(name), AGAIN).image
            pixels = np.asarray(image.convert(mode))
            require(self.shown(name), pixels, alpha_of(image))
        return pixels

    def shown(self, name: str) -> Path:
        """Returns the file as errors name it."""
        return Path(f"{self.path}: {name}") if self._zip else self.path / name.split("/", 1)[1]

    def demand(self, wanted: dict[str, bool], what: str) -> None:
        """Raises InputError with all keys of `wanted` that are False."""
        missing = [name for name, there in wanted.items() if not there]
        if missing:
            raise InputError(f"{self.path}: {what} missing: {'; '.join(missing)}. Complete the download as published.")

    def demand_files(self, names: Iterable[str]) -> None:
        """Raises InputError with the first of `names` that are not in the source."""
        missing = sorted(name for name in names if name not in self.names)
        if missing:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise InputError(f"{self.path}: {', '.join(missing[:5])}{more} missing. Complete the download as published.")


def resize(image: np.ndarray, mask: np.ndarray, size: int | None, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Resizes an image (bilinear) and its mask (nearest) to size x size; with size None, returns them unchanged.

    Both are uint8: (H, W, 3) or (H, W), and (H, W). Raises InputError with `name` if height or width differ in the source.
    """
    require_same_size(image, mask, name)
    if size is None:
        return image, mask
    nearest = Image.fromarray(mask).resize((size, size), Image.Resampling.NEAREST)
    return scaled(image, size), np.asarray(nearest)


def require_same_size(image: np.ndarray, mask: np.ndarray, name: str) -> None:
    """Raises InputError with `name` if an image (H, W, ...) and its mask (H, W) differ in size."""
    if image.shape[:2] != mask.shape:
        (h, w), (mh, mw) = image.shape[:2], mask.shape
        raise InputError(f"{name}: image {w} x {h} and mask {mw} x {mh} differ in size. Correct the source.")


def settled(parts: Iterable[bytes], most: int, file: Path) -> IO[bytes]:
    """Returns a stream of what an unpacker yields, in memory or, if it is large, in a temporary file that has no name.

    Raises:
        BadFile: it is more than `most` bytes. Names `file`.
    """
    stream: Any = SpooledTemporaryFile(IN_MEMORY)  # noqa: SIM115  # the caller closes it
    left = most
    for part in parts:
        left -= len(part)
        if left < 0:
            stream.close()
            what = f"unpacks to more than {amount(most)}, which is the limit"
            raise BadFile(Problem(file, what, "Make it smaller"))
        stream.write(part)
    stream.seek(0)
    return cast(IO[bytes], stream)


def read_up_to(stream: IO[bytes] | gzip.GzipFile, count: int) -> bytes:
    """Reads the next `count` bytes, fewer at the end, in parts, because one read of a decompressor may return too much."""
    parts, left = [], count
    while left and (part := stream.read(min(left, MIB))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _below(top: Path) -> Iterator[tuple[str, str]]:
    """Yields the path below `top` of each file at any depth, with "", and of what is not read, with the reason.

    Linked folders are not entered: links may form a ring, and lead out of the folder.
    """
    failed: list[OSError] = []
    for parent, folders, others in os.walk(top, onerror=failed.append):
        folders[:] = [name for name in folders if not _is_hidden(name)]
        for path in (Path(parent, name) for name in (*folders, *others)):
            name = path.relative_to(top).as_posix()
            if path.is_file():
                yield name, ""
            elif path.is_symlink():
                yield name, "is a link to a folder or to nothing, which is not read"
            elif not path.is_dir():
                yield name, "is not a regular file"
    for error in failed:
        yield Path(error.filename).relative_to(top).as_posix(), f"is a folder that cannot be read ({error.strerror})"


def _is_hidden(name: str) -> bool:
    file = PurePosixPath(name).name
    return file.startswith(".") or file == "lost+found"  # the file system's own, as at the top of a disk


def _is_zip(path: Path) -> bool:
    try:
        with opened(path, ARCHIVE_BYTES) as stream:
            return zipfile.is_zipfile(stream)
    except FileNotFoundError:
        return False
