"""What a FLARE process logs of other participants' words commands no terminal and forges no record."""

import io
import logging

import pytest
from nvflare.fuel.utils.log_utils import BaseFormatter, JsonFormatter

from feddp.flare.logs import PlainRecord, plain_records
from feddp.limits import TEXT

EVIL = "site\x1b]0;owned\x07\x9b1A\u202e\n2026-11-28 12:00:00,000 - gate - INFO - all is well"


@pytest.fixture
def logged(request):
    """A logger, and what its handler of this formatter has written."""
    before = logging.getLogRecordFactory()
    logging.setLogRecordFactory(logging.LogRecord)  # a gate of another test may have changed it
    logger, stream = logging.Logger("a"), io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(request.param())
    logger.addHandler(handler)
    yield logger, stream
    logging.setLogRecordFactory(before)


@pytest.mark.parametrize("logged", [BaseFormatter, JsonFormatter, logging.Formatter], indirect=True)
def test_a_record_is_plain(logged):
    logger, stream = logged
    logger.warning("client %s registered", EVIL)
    assert "\x1b" in stream.getvalue() or "\\u001b" in stream.getvalue(), "the control"
    stream.truncate(stream.seek(0))
    plain_records()
    logger.warning("client %s registered", EVIL)
    logger.warning(f"client {EVIL} 100 % registered")
    try:
        raise ValueError(EVIL)
    except ValueError:
        logger.exception("failed")
    text = stream.getvalue()
    assert not [sign for sign in ("\x1b", "\x07", "\x9b", "\u202e", "\\u001b", "\\x1b") if sign in text]
    assert not [line for line in text.splitlines() if line.startswith("2026-11-28 12:00")]
    assert text.count("owned") >= 2


def test_a_record_is_bounded():
    record = PlainRecord("a", logging.INFO, "", 1, "x" * 10**6, (), None)
    assert len(record.getMessage()) <= TEXT + 3


def test_of_a_long_traceback_both_ends_are_kept():
    """Errors that were raised for one another, as FLARE's: the first line says where it began, the last one what it was."""
    chain = None
    for step in range(300):
        error = ValueError(f"step {step} {'x' * 100}")
        error.__cause__, chain = chain, error
    record = PlainRecord("feddp", logging.ERROR, "", 1, "failed", None, (ValueError, chain, None))
    assert record.exc_text.startswith("    ValueError: step 0 x")
    assert "step 299 x" in record.exc_text.splitlines()[-1]
    assert "[...]" in record.exc_text
    assert len(record.exc_text) < 2 * TEXT


def test_a_record_that_does_not_fit_its_arguments_is_left_to_logging():
    record = PlainRecord("a", logging.INFO, "", 1, "%d", ("x",), None)
    with pytest.raises(TypeError):
        record.getMessage()
