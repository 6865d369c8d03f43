"""Finds the pictures, volumes and series below a folder of a source."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from feddp.data.formats.scan import Scan
from feddp.data.names import composed
from feddp.data.prepare.source import IMAGES, Source
from feddp.data.progress import track
from feddp.errors import FedDPError, InputError
from feddp.limits import FILE_NAME, SERIES_FILES
from feddp.partition import some

if TYPE_CHECKING:
    from feddp.data.formats.dicom import Header

PICTURE, NIFTI, DICOM = "picture", "nifti", "dicom"
VOLUMES = (".nii", ".nii.gz")
VOXELS = ".img"  # of a volume whose header is a file beside
SERIES = (".dcm", ".dicom", ".ima")
CATALOGUE = "dicomdir"  # of a disk's DICOM files
MASKS = ("", "_mask", "_seg", "_segmentation", "_label")  # what a mask's name has behind its image's
# of files that lie beside images: texts, tables, and what an exported disk brings
_BESIDE = (
    *(".txt", ".md", ".rtf", ".pdf", ".doc", ".docx", ".log", ".htm", ".html", ".css", ".js", ".csv", ".tsv", ".xls", ".xlsx"),
    *(".ods", ".json", ".yaml", ".yml", ".xml", ".ini", ".inf", ".db", ".bval", ".bvec", ".md5", ".sha256", ".exe", ".dll"),
    *(".jar", ".ico", ".lnk", ".url", "/readme", "/license", "/licence", f"/{CATALOGUE}"),
)
_BEHIND = 20  # bytes of a file's name that follow an image's: the slice, the class, the ending


@dataclass(frozen=True)
class FoundImage:
    """A picture, a volume or a series.

    Args:
        name: its path below the folder, without ending and with _ for /, which is the name of its image or images.
        files: one file, or those of the series.
        patient: the PatientID of a series, else the first folder of its path, else its name.
        series, frame: the UIDs of a series and of its frame of reference.
        images: the UIDs of a series' images.
    """

    name: str
    kind: str
    files: tuple[str, ...]
    patient: str
    series: str = ""
    frame: str = ""
    images: frozenset[str] = frozenset()

    def read(self, tree: Source, axis: str) -> Scan:
        """Returns the pixels; raises InputError if they cannot be read. `axis` is for NIfTI volumes."""
        if self.kind == PICTURE:
            from feddp.data.formats.pictures import read_picture

            return read_picture(tree, self.files[0])
        if self.kind == NIFTI:
            from feddp.data.formats.nifti import read_volume

            return read_volume(tree, self.files[0], axis)
        from feddp.data.formats.dicom_series import read_series

        return read_series(tree, self.files)


@dataclass
class Found:
    """What is below a folder.

    Attributes:
        entries: sorted by name.
        annotations: files that are DICOM SEG or RTSTRUCT.
        refused: what is wrong with the files that could not be listed.
        others: files of other kinds; of these, `is_beside` tells those that are no images.
        asides: {what DICOM files are that hold no image, or one that only accompanies others of its study: these files}.
    """

    entries: list[FoundImage] = field(default_factory=list)
    annotations: list[str] = field(default_factory=list)
    refused: list[FedDPError] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    asides: dict[str, list[str]] = field(default_factory=dict)

    @property
    def notes(self) -> Iterator[str]:
        """What is left out of `asides`, one line for each kind."""
        for kind, names in sorted(self.asides.items()):
            yield f"left out, as {kind}: {some(sorted(names), 3)}"

    @property
    def unread(self) -> list[str]:
        """The files of other kinds that may be images or masks all the same, sorted."""
        return sorted(name for name in self.others if not is_beside(name))

    def mask_of(self, entry: FoundImage) -> FoundImage | None:
        """Returns the picture or volume with the name of an image, or its name and one of MASKS; looked for in masks."""
        return self._named(*(entry.name + end for end in MASKS))

    def of_class(self, entry: FoundImage, name: str) -> FoundImage | None:
        """Returns the picture or volume that is the mask of one class: <image>_<class>, or <image> in the folder <class>."""
        return self._named(f"{entry.name}_{name}", f"{name}_{entry.name}")

    def _named(self, *names: str) -> FoundImage | None:
        found = self._files
        return next((found[name.casefold()] for name in names if name.casefold() in found), None)

    @cached_property
    def _files(self) -> dict[str, FoundImage]:
        return {each.name.casefold(): each for each in self.entries if each.kind != DICOM}


def is_beside(name: str) -> bool:
    """Whether a file of another kind certainly holds no image, so that nothing is lost with it."""
    return f"/{name.lower()}".endswith(_BESIDE)


def find(tree: Source, folder: str) -> Found:
    """Lists what is below `folder`, a path of `tree`, at any depth. Of DICOM files the headers are read, to group them.

    Raises:
        InputError: two files would have the same name.
    """
    found = Found()
    series: dict[str, list[str]] = defaultdict(list)
    kinds: list[tuple[str, str]] = []
    found.refused += [wrong for name, wrong in tree.unread.items() if name.startswith(f"{folder}/")]
    for name in sorted(tree.names):
        if name.startswith(f"{folder}/"):
            kinds.append((name, _kind(tree, name, found)))
    for name, kind in kinds:
        if kind == DICOM:
            series[str(PurePosixPath(name).parent)].append(name)
        elif kind:
            below = PurePosixPath(name).relative_to(folder)
            plain = _joined((*below.parts[:-1], _stem(below.name)))
            patient = composed(below.parts[0].strip()) if len(below.parts) > 1 else plain
            found.entries.append(FoundImage(plain, kind, (name,), patient))
    if series:
        _group(tree, folder, [name for names in series.values() for name in names], found)
    _require_distinct(found.entries)
    found.entries.sort(key=lambda entry: entry.name)
    return found


def _kind(tree: Source, name: str, found: Found) -> str:
    lower = name.lower()
    if lower.endswith(IMAGES):
        return PICTURE
    if lower.endswith(VOLUMES):
        return NIFTI
    if tree.partner(name):
        return NIFTI if lower.removesuffix(".gz").endswith(VOXELS) else ""
    if lower.endswith(SERIES):
        return DICOM
    if lower.endswith(f"/{CATALOGUE}"):
        found.others.append(name)
        return ""
    from feddp.data.formats.dicom import is_dicom

    try:
        if is_dicom(tree, name):  # its files often have no ending
            return DICOM
        found.others.append(name)
    except FedDPError as error:
        found.refused.append(error)
    return ""


def _group(tree: Source, folder: str, names: Iterable[str], found: Found) -> None:
    """Makes an entry of each series: named after its folder, and numbered where a folder holds several."""
    from feddp.data.formats.dicom import Header, read_header

    names = list(names)
    series: dict[tuple[str, str, str, str], list[Header]] = defaultdict(list)
    for name in track(names, f"Reading {len(names)} DICOM headers"):
        try:
            header = read_header(tree, name)
        except FedDPError as error:
            found.refused.append(error)
            continue
        if header.other:
            found.asides.setdefault(header.other, []).append(name)
        elif header.masks:
            found.annotations.append(name)
        else:
            several = name if header.frames > 1 else ""  # a file of several frames is a series by itself
            series[str(PurePosixPath(name).parent), header.series, several, header.aside].append(header)
    studies = {each.study for (*_, aside), headers in series.items() if not aside for each in headers}
    for key, headers in list(series.items()):
        if key[-1] and headers[0].study in studies:
            found.asides.setdefault(key[-1], []).extend(header.name for header in headers)
            del series[key]
    for headers in series.values():
        _leave_out_copies(tree, headers, found)
    count: dict[str, int] = defaultdict(int)
    shared = {parent for parent, n in Counter(parent for parent, *_ in series).items() if n > 1}
    for (parent, uid, *_), headers in sorted(series.items(), key=lambda item: (item[0][0], item[1][0].number, item[0][1:])):
        if len(headers) > SERIES_FILES:
            found.refused.append(InputError(f"{tree.shown(parent)}: a series has more than {SERIES_FILES} files. Give fewer."))
            continue
        headers.sort(key=lambda header: (header.instance, header.name))
        parts = PurePosixPath(parent).relative_to(folder).parts
        patient = _joined((headers[0].patient,)) or (parts[0] if parts else "series")
        count[parent] += 1
        plain = _joined(parts or (patient,)) + (f"_{count[parent]}" if parent in shared else "")
        images = frozenset(header.image for header in headers) - {""}
        files = tuple(header.name for header in headers)
        found.entries.append(FoundImage(plain, DICOM, files, patient, uid, headers[0].frame, images))


def _leave_out_copies(tree: Source, headers: "list[Header]", found: Found) -> None:
    """Of the files of a series that have the same bytes, leaves the first."""
    images: dict[str, list[Header]] = defaultdict(list)
    for header in headers:
        images[header.image].append(header)
    for alike in images.values():
        first: dict[bytes, Header] = {}
        for header in alike if len(alike) > 1 else ():
            if first.setdefault(tree.digest(header.name), header) is not header:
                found.asides.setdefault("copies of other files", []).append(header.name)
                headers.remove(header)


def _require_distinct(entries: Iterable[FoundImage]) -> None:
    seen: dict[str, FoundImage] = {}
    for entry in entries:
        if (other := seen.setdefault(entry.name.casefold(), entry)) is not entry:
            same = composed(other.files[0]) == composed(entry.files[0])
            alike = ", which differ in how they write accents (Unicode NFC and NFD)" if same else ""
            raise InputError(f"{other.files[0]} and {entry.files[0]} would both be {entry.name}{alike}. Rename one.")


def _stem(name: str) -> str:
    file = PurePosixPath(name)
    packed = name.lower().endswith(tuple(f"{ending}.gz" for ending in (".nii", VOXELS)))
    return PurePosixPath(file.stem).stem if packed else file.stem


def _joined(parts: Iterable[str]) -> str:
    """Returns a name for files, of the parts of a path."""
    text = composed("_".join(part.strip() for part in parts))
    plain = "".join(letter if letter.isprintable() and letter not in '/\\:*?"<>|' else "-" for letter in text)
    return plain.encode()[: FILE_NAME - _BEHIND].decode(errors="ignore")
