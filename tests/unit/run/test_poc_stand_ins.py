"""POC mode with stand-ins for FLARE's processes and its session; with FLARE itself: tests/federation/test_poc.py."""

from types import SimpleNamespace

import pytest

from feddp.errors import FedDPError, InputError
from feddp.run.poc import PocJob


@pytest.mark.parametrize(
    ("raised", "kind", "said"),
    [
        (
            TypeError("half an answer"),
            FedDPError,
            r"POC server does not answer \(TypeError: half an answer\); see .*log.txt$",
        ),
        (InputError("ours"), InputError, "^ours$"),
        (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
    ],
)
def test_whatever_flares_session_raises_is_said_with_the_log(tmp_path, raised, kind, said):
    """Errors of our own, and Ctrl-C, stay what they are."""

    def fails(job):
        raise raised

    job = PocJob(tmp_path, SimpleNamespace(submit_job=lambda folder: "id", get_job_meta=fails), tmp_path)
    job._checked = float("-inf")
    with pytest.raises(kind, match=said) as caught:
        job.finished()
    assert type(caught.value) is kind
