"""What every participant's kit needs from us: the allow-list, and each site's own policy."""

import json
from pathlib import Path
from typing import Any

from nvflare.lighter.entity import Project
from nvflare.lighter.spec import Builder, ProvisionContext

from feddp.errors import FedDPError
from feddp.jobs import SCOPE, SERVER_CLASSES, SITE_CLASSES

GUARD = "feddp.flare.filters.PrivateTensorGuard"


def privacy(properties: dict[str, Any]) -> dict[str, Any]:
    """A site's privacy.json: one scope, with the site's properties (`flare.policy.SitePolicy`) and the guard on all results."""
    return {
        "scopes": [
            {
                "name": SCOPE,
                "properties": properties,
                "task_result_filters": [{"path": GUARD, "args": {}}],
            }
        ]
    }


def restrict(resources: dict[str, Any], classes: list[str]) -> dict[str, Any]:
    """A participant's resources.json with `classes` as its whole allow-list, and no log streamed to anyone."""
    kept = [c for c in resources.get("components", []) if c["id"] not in ("site_log_streamer", "log_receiver")]
    return resources | {
        "class_list_enforcement_mode": "enforce",
        "class_allow_list": classes,
        "allow_log_streaming": False,
        "components": kept,
    }


class SitePolicyBuilder(Builder):
    """A FLARE provisioning builder: our allow-list in every kit, and a privacy.json in every site's.

    Args:
        sites: each site's properties, by name: where its data lie on its own machine, its device, its consent.
    """

    def __init__(self, sites: dict[str, dict[str, Any]]):
        super().__init__()
        self.sites = sites

    def build(self, project: Project, ctx: ProvisionContext) -> None:
        self._restrict(Path(ctx.get_local_dir(project.get_server())), sorted(SERVER_CLASSES.values()))
        for client in project.get_clients():
            if client.name not in self.sites:
                raise FedDPError(f"site {client.name} has no entry in SitePolicyBuilder's `sites`; add its properties")
            local = Path(ctx.get_local_dir(client))
            self._restrict(local, sorted(SITE_CLASSES.values()))
            policy = privacy(self.sites[client.name])
            (local / "privacy.json").write_text(json.dumps(policy, indent=2) + "\n", encoding="utf-8")

    @staticmethod
    def _restrict(local: Path, classes: list[str]) -> None:
        path = local / "resources.json.default"
        path.write_text(json.dumps(restrict(json.loads(path.read_text()), classes), indent=2) + "\n", encoding="utf-8")
