"""What libraries do with a file of unknown origin is one error of ours, without their warnings."""

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

from feddp.errors import BadFile, FedDPError, Problem
from feddp.reading import short

AGAIN = "Save or copy it again, or leave it out"
LIBRARIES = ("pydicom", "highdicom", "tifffile", "nibabel.global")  # that also log what they warn of


# what only who knows the program's code understands: kinds of errors, and words in the texts of others
_OF_CODE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    NotImplementedError,
    TypeError,
    UnicodeError,
)
_WORDS = re.compile(
    r"object|None|dtype|ufunc|operand|literal|float:|argument|array|unpack|buffer|attribute|\w=|\w\(\)|<class|'b'|\bb'"
)


def _reason(error: Exception) -> str:
    """Returns why a library cannot read a file, in words for its user; "" if it does not say so."""
    if type(error).__name__ == "InvalidDicomError":
        return "it does not begin as DICOM files do"
    text = short(" ".join(str(error).split()), 200)
    return "" if isinstance(error, _OF_CODE) or _WORDS.search(text) else text


@contextmanager
def guarded(file: Path, what: str, remedy: str = AGAIN) -> Iterator[None]:
    """Raises BadFile, "`file` `what` (why)", for every exception but ours: a file may hold any bytes, and readers raise any.

    Why is left out where only the code explains it.

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
        why = _reason(error)
        raise BadFile(Problem(file, f"{what} ({why})" if why else what, remedy)) from None
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
