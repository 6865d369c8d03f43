"""What nobody has the right to from the admin console: no code by way of a command, no text of a site's errors. A site
answers none of it whoever has what right (test_gate.py)."""

import json
import subprocess
import sys

import pytest
from nvflare.fuel.sec.authz import AuthorizationService, AuthzContext, Person
from nvflare.security.security import FLAuthorizer

from feddp.provision import AUTHORIZATION, NOBODY


@pytest.mark.parametrize("role", AUTHORIZATION["permissions"])
@pytest.mark.parametrize("command", NOBODY)
def test_nobody_has_the_right_to_them(monkeypatch, role, command):
    """Not even to those of one's own job, or at one's own site. The control is another command of the same category."""
    monkeypatch.setattr(AuthorizationService, "the_authorizer", FLAuthorizer("hospital", AUTHORIZATION))
    person = Person("x@y", "hospital", role)

    def authorized(right):
        return AuthorizationService.authorize(AuthzContext(user=person, submitter=person, right=right))[0]

    assert not authorized(command)
    assert authorized("check_status")
    assert authorized("abort_job") == (role != "member")
    assert authorized("restart") == (role in ("project_admin", "org_admin"))


@pytest.mark.parametrize(
    ("role", "own", "others"),
    [("project_admin", True, True), ("lead", True, False), ("org_admin", False, False), ("member", False, False)],
)
def test_a_running_job_tells_its_numbers_to_those_who_may_download_its_results(monkeypatch, role, own, others):
    """`show_stats`, of one's own job and of another person's; the control is the download itself."""
    monkeypatch.setattr(AuthorizationService, "the_authorizer", FLAuthorizer("hospital", AUTHORIZATION))
    me, other = Person("x@y", "hospital", role), Person("z@y", "hospital", role)
    for right in ("show_stats", "download_job"):
        for submitter, allowed in ((me, own), (other, others)):
            assert AuthorizationService.authorize(AuthzContext(user=me, submitter=submitter, right=right))[0] == allowed


def test_a_logs_configuration_is_code(tmp_path):
    """Why: Python calls what it names. What FLARE's `configure_job_log` hands to a site's job process ends in this function."""
    made = tmp_path / "made by the configuration"
    configuration = {"version": 1, "handlers": {"x": {"()": "os.mkdir", "path": str(made)}}}
    called = "import sys; from nvflare.fuel.utils.log_utils import dynamic_log_config; dynamic_log_config(sys.argv[1], '', '')"
    subprocess.run([sys.executable, "-c", called, json.dumps(configuration)], capture_output=True, check=False)
    assert made.is_dir()
