"""A downloaded data set, folder or zip, read in place: nothing is unpacked to disk."""

import io
import zipfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

import numpy as np
from PIL import Image, UnidentifiedImageError

from feddp.errors import FedDPError

IMAGES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp")


class Source:
    """The files of a folder or zip by name: path below the source, with / between, the source's own name first.

    The own name comes first so that a user may point at a layout's top folder or at what holds it.
    """

    def __init__(self, path: Path):
        """FedDPError where `path` is neither a folder nor a zip."""
        self.path = Path(path)
        self._zip = None
        if self.path.is_dir():
            top = self.path.resolve()
            found = (f"{top.name}/{file.relative_to(top).as_posix()}" for file in top.rglob("*") if file.is_file())
        elif zipfile.is_zipfile(self.path):
            self._zip = zipfile.ZipFile(self.path)
            found = (f"{self.path.stem}/{name}" for name in self._zip.namelist() if not name.endswith("/"))
        else:
            raise FedDPError(f"{self.path}: neither a folder nor a zip. Give the data set as downloaded.")
        # Mac archives carry a shadow "._name" of every file.
        self.names = frozenset(n for n in found if not PurePosixPath(n).name.startswith("."))

    def read(self, name: str) -> bytes:
        below = name.split("/", 1)[1]
        return self._zip.read(below) if self._zip else (self.path / below).read_bytes()

    def folder(self, tail: str) -> tuple[str, dict[str, str]]:
        """The one folder, at any depth, whose path ends in `tail`: its path, and stem -> name of the images in it.

        ("", {}) where there is none. FedDPError where there are two, or two images of one stem.
        """
        folders: dict[str, dict[str, str]] = {}
        for name in sorted(self.names):
            file = PurePosixPath(name)
            if file.suffix.lower() in IMAGES and f"/{file.parent}".endswith(f"/{tail}"):
                stems = folders.setdefault(str(file.parent), {})
                if file.stem in stems:
                    raise FedDPError(f"{self.path}: both {stems[file.stem]} and {name} are there. Keep one.")
                stems[file.stem] = name
        if len(folders) > 1:
            raise FedDPError(f"{self.path}: {tail} is there more than once ({', '.join(folders)}). Keep one.")
        return next(iter(folders.items()), ("", {}))

    def image(self, name: str) -> Image.Image:
        """The decoded image. FedDPError where it cannot be decoded."""
        try:
            image = Image.open(io.BytesIO(self.read(name)))
            image.load()
        except (UnidentifiedImageError, OSError, SyntaxError, ValueError, zipfile.BadZipFile) as error:
            raise FedDPError(f"{self.path}: {name} is not a readable image ({error}). Download it again.") from None
        return image

    def rgb(self, name: str) -> np.ndarray:
        """uint8 (H, W, 3)."""
        return np.asarray(self.image(name).convert("RGB"))

    def grey(self, name: str) -> np.ndarray:
        """uint8 (H, W); a bilevel image becomes 0 and 255."""
        return np.asarray(self.image(name).convert("L"))

    def demand(self, wanted: dict[str, bool], what: str) -> None:
        """One FedDPError naming every key of `wanted` that is False."""
        missing = [name for name, there in wanted.items() if not there]
        if missing:
            raise FedDPError(f"{self.path}: {what} missing: {'; '.join(missing)}. Complete the download as published.")

    def demand_files(self, names: Iterable[str]) -> None:
        """One FedDPError naming the first few of `names` that are not in the source."""
        missing = sorted(name for name in names if name not in self.names)
        if missing:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise FedDPError(f"{self.path}: {', '.join(missing[:5])}{more} missing. Complete the download as published.")


def resize(image: np.ndarray, mask: np.ndarray, size: int | None, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Image (bilinear) and mask (nearest) at size x size, or as they are where size is None.

    uint8, (H, W, 3) or (H, W), and (H, W). FedDPError, naming `name`, where the two differ in height or width at the source.
    """
    if image.shape[:2] != mask.shape:
        raise FedDPError(f"{name}: image {image.shape[:2]} and mask {mask.shape} differ in size. Mend the source.")
    if size is None:
        return image, mask
    bilinear = Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR)
    nearest = Image.fromarray(mask).resize((size, size), Image.Resampling.NEAREST)
    return np.asarray(bilinear), np.asarray(nearest)
