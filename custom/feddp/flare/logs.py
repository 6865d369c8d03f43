"""Makes the log records of a FLARE process plain: FLARE and its libraries log the words of other participants as they came."""

import logging
import traceback
from typing import Any

from feddp.limits import TEXT
from feddp.reading import plain, short


class PlainRecord(logging.LogRecord):
    """A log record that no terminal obeys, of bounded length. Its further lines are indented, so that none of them looks like
    another record."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        try:
            message = self.getMessage()
        except Exception:  # logging tells of a record that does not fit its arguments, by their `repr`, when it is written
            return
        self.msg, self.args = _indented(message, TEXT), None
        if isinstance(self.exc_info, tuple) and self.exc_info[0] is not None:
            told = "".join(traceback.format_exception(*self.exc_info)).rstrip()
            begun, ended = told[: TEXT // 2], told[TEXT // 2 :][-TEXT // 2 :]  # the last line has the error
            between = "" if len(told) <= TEXT else "\n[...]\n"
            self.exc_text = "    " + _indented(f"{begun}{between}{ended}", TEXT + len(between))


def plain_records() -> None:
    """Makes all log records of this process plain, whatever writes them where."""
    logging.setLogRecordFactory(PlainRecord)


def _indented(text: str, most: int) -> str:
    return plain(short(text, most)).replace("\n", "\n    ")
