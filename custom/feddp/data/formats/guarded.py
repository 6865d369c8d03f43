"""What libraries do with a file of unknown origin is one error of ours, without their warnings."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

from feddp.errors import BadFile, FedDPError, Problem
from feddp.reading import told

UNREADABLE = "is not a readable image"
AGAIN = "Save or copy it again, or leave it out"
LIBRARIES = ("pydicom", "highdicom", "tifffile", "nibabel.global")  # that also log what they warn of


@contextmanager
def guarded(file: Path, what: str, remedy: str = AGAIN) -> Iterator[None]:
    """Raises BadFile, "`file` `what` (why)", for every exception but ours: a file may hold any bytes, and readers raise any.

    Warnings are dropped: a file breaks many a rule that does not matter here. That of too many pixels is an error.
    """
    loggers = [logging.getLogger(name) for name in LIBRARIES]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL + 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            yield
    except FedDPError:
        raise
    except Exception as error:
        raise BadFile(Problem(file, f"{what} ({told(error)})", remedy)) from None
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
