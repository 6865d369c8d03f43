"""Which images a SEG or an RTSTRUCT belongs to."""

from collections.abc import Sequence
from dataclasses import dataclass

from pydicom import Dataset

from feddp.data.formats.attributes import items_of, text_of
from feddp.data.formats.dicom import BROKEN, load
from feddp.data.formats.dicom_contours import drawn_on, frames_of_structures, spaces_of
from feddp.data.formats.dicom_kinds import CONTOURS, mask_kind
from feddp.data.formats.find import FoundImage
from feddp.data.formats.guarded import guarded
from feddp.data.prepare.source import Source


@dataclass(frozen=True)
class References:
    """What a file of masks says of the images on which they were drawn.

    Args:
        images: the UIDs of the images to which its contours or frames refer.
        series: the UIDs of the series that it lists; where it lists their images too, of those that have one of `images`.
        frames: the UIDs of the frames of reference of its contours.
    """

    images: frozenset[str]
    series: frozenset[str]
    frames: frozenset[str]

    def of(self, entries: Sequence[FoundImage]) -> list[FoundImage]:
        """Returns the series among `entries` to which the masks belong.

        They are those that hold one of the images; else, the listed ones; and if none is listed, the only one of a frame of
        reference.
        """
        if own := [each for each in entries if each.images & self.images]:
            return own
        if self.images or self.series:
            return [each for each in entries if each.series in self.series]
        own = [each for each in entries if each.frame in self.frames]
        return own if len(own) == 1 else []

    @property
    def none(self) -> bool:
        return not self.images and not self.series


def references_of(tree: Source, name: str) -> References:
    """Returns what a SEG or RTSTRUCT says; raises InputError if it cannot be read. Names the file."""
    dataset = load(tree, name, pixels=False)
    with guarded(tree.shown(name), BROKEN):
        if mask_kind(dataset) == CONTOURS:
            spaces, used = spaces_of(dataset), {*frames_of_structures(dataset).values()}
            listed = [series for frame, series in spaces.items() if frame in used] or [*spaces.values()]
            return References(_drawn(dataset), frozenset().union(*listed), frozenset(used or spaces))
        images, series = segmented(dataset), _listed(dataset)
        drawn = {uid for uid, own in series.items() if own & images}
        return References(frozenset(images), frozenset(drawn or series), frozenset())


def segmented(dataset: Dataset) -> set[str]:
    """Returns the UIDs of the images to which the frames of a SEG refer."""
    return {uid for frame in items_of(dataset, "PerFrameFunctionalGroupsSequence") for uid in source_of(frame)}


def source_of(frame: Dataset) -> set[str]:
    """Returns the UIDs of the images to which the functional groups of a frame refer."""
    return {uid for each in items_of(frame, "DerivationImageSequence") for uid in _values(each, "ReferencedSOPInstanceUID")}


def _drawn(dataset: Dataset) -> frozenset[str]:
    """Returns the UIDs of the images to which the contours of an RTSTRUCT refer."""
    structures = items_of(dataset, "ROIContourSequence")
    return frozenset(uid for each in structures for contour in items_of(each, "ContourSequence") for uid in drawn_on(contour))


def _listed(dataset: Dataset) -> dict[str, set[str]]:
    """Returns {series that a SEG lists: those of its images that the SEG lists}."""
    sequences = [element.keyword for element in dataset if element.VR == "SQ"]
    own = [item for keyword in sequences for item in items_of(dataset, keyword)]
    deeper = [item for each in own for item in items_of(each, "ReferencedSeriesSequence")]
    found: dict[str, set[str]] = {}
    for item in (*own, *deeper):
        if uid := text_of(item, "SeriesInstanceUID"):
            found.setdefault(uid, set()).update(_values(item, "ReferencedSOPInstanceUID"))
    return found


def _values(dataset: Dataset, keyword: str) -> set[str]:
    """Returns the values of an element at any depth."""
    return {str(element.value) for element in dataset.iterall() if element.keyword == keyword}
