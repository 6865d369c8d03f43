"""Behind the admission: FLARE's own parser of a job's configuration, as a job's process at a site calls it, builds no class
that the site's list does not name, wherever the job names it. test_deployment.py sees the process of such a job end."""

import json
from argparse import Namespace

import pytest
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace
from nvflare.fuel.common.excepts import ComponentNotAuthorized
from nvflare.private.fed.client.client_json_config import ClientJsonConfigurator
from nvflare.private.fed.utils.fed_utils import authorize_build_component

from feddp.flare.configuration import SITE_CLASSES
from feddp.jobs.folder import export
from feddp.networks import DEFAULT, NETWORKS
from support.small import Small

SITE, JOB = "site-1", "0d2c1f2e-1111-4222-8333-444455556666"
CONFIG = "config/config_fed_client.json"
FILTER = {"path": "nvflare.app_common.filters.exclude_vars.ExcludeVars"}
WIDGET = {"id": "x", "path": "nvflare.app_common.logging.job_log_streamer.JobLogStreamer"}


@pytest.fixture
def parsed(plan_for, tmp_path, monkeypatch):
    """Parses the configuration of an exported job after a change, at a site whose list is that of our kits; the job's tasks."""
    monkeypatch.setitem(NETWORKS, DEFAULT, Small)
    job, kit = export(plan_for(), tmp_path / "job"), tmp_path / "kit"
    (kit / "local").mkdir(parents=True)
    (kit / "startup").mkdir()
    (kit / JOB).mkdir()
    (kit / JOB / "meta.json").write_text((job / "meta.json").read_text())
    policy = {"class_allow_list": sorted(SITE_CLASSES.values()), "class_list_enforcement_mode": "enforce"}
    (kit / "local/resources.json").write_text(json.dumps(policy))

    def parse(change):
        file = job / "app_client" / CONFIG
        config = json.loads(file.read_text())
        change(config)
        file.write_text(json.dumps(config))
        workspace, context = Workspace(str(kit), SITE), FLContext()
        for name, value in ((FLContextKey.WORKSPACE_OBJECT, workspace), (FLContextKey.CURRENT_JOB_ID, JOB)):
            context.set_prop(name, value, private=True, sticky=False)
        given = Namespace(sp_scheme="https", sp_target="localhost:1", client_name=SITE, workspace=str(kit), job_id=JOB)
        parser = ClientJsonConfigurator(workspace, str(file), given, str(job / "app_client"))
        parser.set_component_build_authorizer(authorize_build_component, fl_ctx=context, event_handlers=[])
        parser.configure()
        return {task for each in parser.executors for task in each.tasks}

    return parse


def test_a_genuine_job_is_built(parsed):
    """The control: its classes are all on the list."""
    assert parsed(lambda config: None) >= {"train", "evaluate"}


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda config: config["components"].append(WIDGET), r"components\.#2"),
        (lambda config: config["task_result_filters"][0]["filters"].append(FILTER), r"task_result_filters\.#1\.filters\.#2"),
        (lambda config: config["executors"][0].update(executor=FILTER), r"executors\.#1\.executor"),
    ],
    ids=["component", "filter", "executor"],
)
def test_a_class_off_the_list_is_built_nowhere(parsed, change, place):
    with pytest.raises(
        ComponentNotAuthorized, match=rf"Component 'nvflare\.app_common\.\S+' at config path '{place}' is not in"
    ):
        parsed(change)
