"""The options of `feddp data prepare folder`, as they are typed and as they are meant."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from feddp.data.description import LABELS
from feddp.data.formats.labels import Colour, colours_of
from feddp.data.formats.scan import AXES, known, window_of
from feddp.data.preparation import Window
from feddp.errors import InputError
from feddp.limits import CLASSES, VOXELS
from feddp.reading import PLAIN_NAME, is_plain_name, short


@dataclass(frozen=True)
class FolderOptions:
    """What the options of `feddp data prepare folder` say.

    Args:
        classes: of dataset.json.
        labels: of dataset.json; None: nested, unless the masks show otherwise.
        colours: {colour: value in a mask}, if masks are coloured.
        threshold: of 255; a mask of one class whose values are not 0 and 1 is foreground above it. None: of masks of two
            levels alone, between them.
        axis: along which NIfTI volumes are sliced.
        window: the values that become 0 and 255.
        mm: millimetres between rows and between columns of pictures, which do not say it.
        channels: 1 or 3: all images are converted. If None, all must have the channels of the first one.
        voxels: the most of a volume or series.
    """

    classes: tuple[str, ...]
    labels: str | None
    colours: Mapping[Colour, int]
    threshold: int | None
    axis: str
    window: Window | None
    mm: tuple[float, float] | None
    channels: int | None
    voxels: int

    @classmethod
    def of(
        cls,
        classes: tuple[str, ...],
        labels: str | None,
        colours: Sequence[str],
        threshold: int | None,
        axis: str,
        window: str | None,
        spacing: str | None,
        channels: int | None,
        voxels: int = VOXELS,
    ) -> "FolderOptions":
        """Reads the options as they are typed; raises InputError if one is wrong."""
        if not 0 < len(classes) <= CLASSES or len(set(classes)) < len(classes) or not all(map(is_plain_name, classes)):
            rule = f"give 1 to {CLASSES} different names, comma-separated, each of {PLAIN_NAME}"
            raise InputError(f"--classes {short(','.join(classes))}: {rule}.")
        for option, value, allowed in (
            ("labels", labels, (None, *LABELS)),
            ("axis", axis, tuple(AXES)),
            ("channels", channels, (None, 1, 3)),
        ):
            if value not in allowed:
                raise InputError(f"--{option} {value}: use {' or '.join(str(each) for each in allowed if each)}.")
        found = colours_of(colours, classes)
        return cls(classes, labels, found, threshold, axis, window_of(window), _millimetres(spacing), channels, voxels)


def _millimetres(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if len(values) not in (1, 2) or not known(*values):
        raise InputError(f"--spacing {text}: give the millimetres between pixels, such as 0.5, or ROWS,COLUMNS.")
    return values[0], values[-1]
