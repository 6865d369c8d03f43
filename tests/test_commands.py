"""What the admin console may not have a site do: no code by way of a command, no text of a site's errors."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from nvflare.apis.fl_context import FLContext
from nvflare.apis.utils.decomposers import flare_decomposers
from nvflare.fuel.sec.audit import AuditService
from nvflare.fuel.sec.authz import AuthorizationService, AuthzContext, Person
from nvflare.private.admin_defs import Message, ok_reply
from nvflare.private.defs import new_cell_message
from nvflare.private.event import fire_event
from nvflare.private.fed.client.admin import FedAdminAgent, RequestProcessor
from nvflare.security.security import FLAuthorizer

from feddp.flare.commands import NEVER, RefuseCommands
from feddp.provision import AUTHORIZATION


class Does(RequestProcessor):
    """Answers everything: whether it is asked is what is looked at."""

    def get_topics(self):
        return ["topic"]

    def process(self, req, app_ctx):
        return ok_reply(body="done")


@pytest.fixture
def site(tmp_path):
    """FLARE's own part of a site that answers commands, with the components of its resources.json."""
    flare_decomposers.register()
    AuditService.close()
    AuditService.initialize(str(tmp_path / "audit.txt"))

    def with_components(*components):
        engine = SimpleNamespace(new_context=FLContext, fire_event=lambda event, ctx: fire_event(event, components, ctx))
        agent = FedAdminAgent("admin_agent", SimpleNamespace(register_request_cb=lambda **_: None), engine)
        agent.register_processor(Does())

        def asked(command):
            """As FLARE's server passes on `configure_job_log`: authorized there, not to be looked up here."""
            request = Message("topic", "")
            request.set_headers({"admin_command": command, "require_authz": "false", "user_role": "lead"})
            return agent._dispatch_request(new_cell_message({}, request)).payload.body

        return asked

    yield with_components
    AuditService.close()


@pytest.mark.parametrize("command", NEVER)
def test_a_site_answers_none_of_them_whatever_the_server_allows(site, command):
    assert site()(command) == "done", "the control: without our component FLARE's site does as it is told"
    assert site(RefuseCommands())(command) == f"{command} is answered by no site"
    assert site(RefuseCommands())("report_resources") == "done"


@pytest.mark.parametrize("role", AUTHORIZATION["permissions"])
@pytest.mark.parametrize("command", NEVER)
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


def test_a_logs_configuration_is_code(tmp_path):
    """Why: Python calls what it names. What FLARE's `configure_job_log` hands to a site's job process ends in this function."""
    made = tmp_path / "made by the configuration"
    configuration = {"version": 1, "handlers": {"x": {"()": "os.mkdir", "path": str(made)}}}
    called = "import sys; from nvflare.fuel.utils.log_utils import dynamic_log_config; dynamic_log_config(sys.argv[1], '', '')"
    subprocess.run([sys.executable, "-c", called, json.dumps(configuration)], capture_output=True, check=False)
    assert made.is_dir()
