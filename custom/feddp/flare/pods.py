"""Takes from the pods of jobs what a job does not need: FLARE 2.9 mounts the token of the namespace's service account into
them, with which a job could call the cluster's API, and lets their processes gain rights."""

from functools import wraps
from typing import Any

from nvflare.app_opt.job_launcher.k8s_launcher import K8sJobHandle

CONTAINER = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
SECCOMP = {"type": "RuntimeDefault"}


def restrict_pods() -> None:
    """Makes FLARE's launcher ask for pods without a token, without rights to gain, and with the runtime's seccomp profile."""
    manifest = K8sJobHandle.get_manifest
    if hasattr(manifest, "__wrapped__"):  # it is done
        return

    @wraps(manifest)
    def restricted(handle: K8sJobHandle) -> dict[str, Any]:
        pod: dict[str, Any] = manifest(handle)
        spec = pod["spec"]
        spec["automountServiceAccountToken"] = False
        spec["securityContext"] = {"seccompProfile": SECCOMP} | (spec.get("securityContext") or {})
        for container in spec["containers"]:
            container["securityContext"] = (container.get("securityContext") or {}) | CONTAINER
        return pod

    K8sJobHandle.get_manifest = restricted
