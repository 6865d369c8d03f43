"""How a job's process, container or pod ended: by itself, or by a signal.

FLARE's handles of containers and pods show a job that a signal ended as one that failed. So this asks Docker for a container's
exit code while the container runs, because it is removed at its end; and Kubernetes for a pod's, after its end.
"""

import signal
import threading
from pathlib import Path
from typing import Any

from nvflare.apis.job_launcher_spec import JobHandleSpec, JobReturnCode
from nvflare.app_common.job_launcher.process_launcher import ProcessHandle
from nvflare.app_opt.job_launcher.docker_launcher import DockerJobHandle
from nvflare.app_opt.job_launcher.k8s_launcher import K8sJobHandle

BY_SIGNAL = 128  # an engine adds this number to a signal's
PATIENCE = 10.0  # seconds for the engine's answer to us, after FLARE has had the same one
_VMSTAT = Path("/proc/vmstat")  # Linux counts here how often it ended a process for want of memory, in containers too


class Started:
    """A job that one of FLARE's launchers has started. Of a handle that is not known here, nobody knows how it ended."""

    def __init__(self, handle: Any):
        self.handle = handle

    def ending(self) -> tuple[int | None, bool]:
        """Returns how the job ended: its exit code, below 0 if a signal ended it, None if unknown; whether memory was short."""
        return None, False

    def clear(self) -> None:
        """Removes what the job, which has ended, left in the way of the next start."""


class Process(Started):
    """A process of this machine."""

    def __init__(self, handle: ProcessHandle):
        super().__init__(handle)
        self._killed = killed_for_memory()

    def ending(self) -> tuple[int | None, bool]:
        code = self._code()
        return code, code == -signal.SIGKILL and killed_for_memory() > self._killed

    def _code(self) -> int | None:
        code: int | None = self.handle.adapter.poll()
        return code


class Container(Process):
    """A container of this machine."""

    def __init__(self, handle: DockerJobHandle):
        super().__init__(handle)
        self._found: int | None = None
        self._asking = threading.Thread(target=self._ask, name=f"exit code of {handle.container_name}", daemon=True)
        self._asking.start()

    def _ask(self) -> None:
        from docker.errors import DockerException  # not installed where no job runs in a container

        try:
            container = self.handle.docker_client.containers.get(self.handle.container_id)
            self._found = _by_signal(int(container.wait()["StatusCode"]))
        except (DockerException, OSError) as error:  # OSError: of requests, by which Docker's client speaks to the engine
            self.handle.logger.warning(f"the engine did not tell the exit code of {self.handle.container_name}: {error}")

    def _code(self) -> int | None:
        self._asking.join(PATIENCE)
        return self._found


class Pod(Started):
    """A pod. One that somebody removed, or that was evicted from its node, counts as ended by a signal."""

    def ending(self) -> tuple[int | None, bool]:
        from kubernetes.client.exceptions import ApiException  # not installed where no job runs in a pod

        code = int(self.handle.poll())
        if code != JobReturnCode.ABORTED:  # it succeeded, could not start, or left a code that FLARE knows
            return code, False
        try:
            pod = self.handle.api_instance.read_namespaced_pod(name=self.handle.pod_name, namespace=self.handle.namespace)
        except ApiException as error:
            return (-signal.SIGKILL if error.status == 404 else None), False
        name = self.handle.job_container["name"]
        ended = [status.state.terminated for status in pod.status.container_statuses or () if status.name == name]
        if not ended or ended[0] is None:
            return -signal.SIGKILL, False
        return _by_signal(ended[0].exit_code), ended[0].reason == "OOMKilled"

    def clear(self) -> None:
        self.handle.terminate()  # deletes the pod: the next one has the same name


KINDS = {ProcessHandle: Process, DockerJobHandle: Container, K8sJobHandle: Pod}


def started(handle: JobHandleSpec) -> Started:
    """Returns the job behind one of FLARE's handles."""
    return next((kind for flares, kind in KINDS.items() if isinstance(handle, flares)), Started)(handle)


def _by_signal(code: int) -> int:
    """Returns an exit code of an engine as Python's subprocess has it: below 0 if a signal ended the process."""
    return BY_SIGNAL - code if code - BY_SIGNAL in signal.valid_signals() else code


def killed_for_memory() -> int:
    """Returns how often this machine ended a process for want of memory since its start; 0 where it does not say."""
    if not _VMSTAT.exists():
        return 0
    counts = dict(line.split() for line in _VMSTAT.read_text(encoding="ascii").splitlines())
    return int(counts.get("oom_kill", 0))
