"""A kit prepared for containers (`nvflare deploy prepare`): what a job's container is given must fit the site's policy."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvflare.apis.fl_constant import WorkspaceConstants
from nvflare.apis.job_def import DEFAULT_STUDY
from nvflare.app_opt.job_launcher.study_data import StudyDatasetMount
from nvflare.app_opt.job_launcher.study_runtime import StudyRuntime, load_study_runtime_file

from feddp.errors import BadFile, Problem
from feddp.sealing.kit import CLIENT, Kit, components

DOCKER, KUBERNETES = "docker", "k8s"  # FLARE's names
LAUNCHERS = {f"nvflare.app_opt.job_launcher.{runtime}_launcher.": runtime for runtime in (DOCKER, KUBERNETES)}
RESULTS = WorkspaceConstants.ENV_VAR_RESULT_ROOT
SEE = "See provisioning/README.md, 'Site images'"
# what of a container a site may choose; the rest could put other code in place of the image's, or open the machine to it
PYTHON = (None, "/usr/local/bin/python", "/usr/local/bin/python3")
ENVIRONMENT = {RESULTS, WorkspaceConstants.ENV_VAR_AUDIT_ROOT, WorkspaceConstants.ENV_VAR_LOG_ROOT}
ENVIRONMENT |= {"CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TZ"}
OPTIONS = {"device_requests", "cap_drop", "security_opt", "read_only"}
HARDENING = {"no-new-privileges", "no-new-privileges:true"}
OPTIONS |= {"shm_size", "mem_limit", "nano_cpus", "cpuset_cpus", "pids_limit"}


def runtime(kit: Kit) -> str | None:
    """What the kit's jobs run in: `DOCKER`, `KUBERNETES`, or None for processes beside the parent's."""
    paths = [str(component.get("path", "")) for component in components(kit.effective("resources.json"))]
    return next((name for prefix, name in LAUNCHERS.items() if any(path.startswith(prefix) for path in paths)), None)


@dataclass(frozen=True)
class Containers:
    """What the site gives the containers of jobs: `file` says it for each study, and the launcher for all."""

    runtime: str
    file: Path
    studies: dict[str, StudyRuntime]
    launcher: dict[str, Any]  # its arguments
    resources: Path  # the file that has the launcher

    @classmethod
    def of(cls, kit: Kit) -> "Containers | None":
        """None where the kit was not prepared for containers.

        Raises:
            BadFile: FLARE would refuse its local/study_runtime.yaml.
        """
        if (found := runtime(kit)) is None:
            return None
        file = kit.folder / "local" / "study_runtime.yaml"
        try:
            studies = load_study_runtime_file(str(file), launcher_mode=found)
        except ValueError as error:
            raise BadFile(Problem(file, f"is refused by FLARE ({error})", SEE)) from error
        resources = kit.effective("resources.json")
        (launcher, *_) = [c for c in components(resources) if str(c.get("path")).startswith(tuple(LAUNCHERS))]
        return cls(found, file, studies, launcher.get("args") or {}, resources)

    @property
    def given(self) -> StudyRuntime:
        """What jobs of ours get."""
        return self.studies.get(DEFAULT_STUDY) or StudyRuntime(DEFAULT_STUDY)

    def problems(self, kind: str) -> list[Problem]:
        """No image to start a job in; at a site, what it keeps of a job lost with the job's container."""
        problems = [*self._code()]
        if not self.given.container_image:
            remedy = f"Name it as studies.{DEFAULT_STUDY}.container.image; a job that brings its own is refused"
            problems.append(Problem(self.file, "gives jobs no image", remedy))
        if kind == CLIENT:
            kept = self.given.env.get(RESULTS)
            mount = self._mount(Path(kept)) if kept else None
            if mount is None or mount.read_only:
                what = f"keeps nothing of a job: {RESULTS} is {kept!r}, which is no dataset mounted for writing"
                problems.append(Problem(self.file, what, SEE))
            elif self.runtime == DOCKER and not Path(mount.source).is_dir():
                problems.append(Problem(Path(mount.source), "is no folder, and jobs are to write there", "Make it"))
        return problems

    def kept(self) -> Path | None:
        """Where on this machine the site keeps what outlives a job; None: in a volume of the cluster.

        Raises:
            BadFile: nothing outlives a job.
        """
        if problems := self.problems(CLIENT):
            raise BadFile(problems[0])
        return self.here(Path(self.given.env[RESULTS]))

    def _code(self) -> Iterator[Problem]:
        """What would run other code than the image's, or open the machine to it."""
        said = self.launcher
        if said.get("config_file_path") is not None or said.get("study_data_pvc_file_path") is not None:
            yield Problem(self.resources, "has the launcher read a file outside the kit", "Write null for it")
        for key in ("default_python_path", "python_path"):
            if said.get(key) not in PYTHON:
                yield Problem(self.resources, f"starts jobs with {said[key]!r}", f"Write {PYTHON[1]}")
        chosen = [(self.resources, said.get("default_job_env"), said.get("default_job_container_kwargs"))]
        chosen += [(self.file, study.env, study.docker_kwargs) for study in self.studies.values()]
        for file, environment, options in chosen:
            for word in sorted({*(environment or {})} - ENVIRONMENT | {*(options or {})} - OPTIONS):
                yield Problem(file, f"gives containers {word}, which the check does not know", f"Take it out. {SEE}")
            security = (options or {}).get("security_opt")
            if set(security or ()) - HARDENING:
                what = f"gives containers security_opt {security!r}"
                yield Problem(file, what, f"There may be {' and '.join(sorted(HARDENING))}")
        for study in self.studies.values():
            for mount in study.datasets:
                if not mount.read_only and study.env.get(RESULTS) not in (None, mount.mount_path):
                    what = f"mounts {mount.source} for writing, which is not where the site keeps what it learns ({RESULTS})"
                    yield Problem(self.file, what, "Mount it read-only")
                if self.runtime == DOCKER and (Path(mount.source) == Path("/") or Path(mount.source).is_socket()):
                    yield Problem(
                        self.file, f"mounts {mount.source}, which opens the machine to jobs", "Name the data's folder"
                    )
            if study.pod_template or study.secret_env or study.secret_mounts:
                what = f"gives containers of study {study.study} a pod template or secrets, which the check does not know"
                yield Problem(self.file, what, f"Take them out. {SEE}")

    def here(self, data: Path) -> Path | None:
        """Where the folder that jobs see as `data` lies on this machine; None: in a volume of the cluster.

        Raises:
            BadFile: no container sees it.
        """
        mount = self._mount(data)
        if mount is None:
            where = ", ".join(dataset.mount_path for dataset in self.given.datasets) or "none"
            what = f"mounts no {data}, which privacy.json names as `data` (jobs see: {where})"
            raise BadFile(Problem(self.file, what, SEE))
        return Path(mount.source) / data.relative_to(mount.mount_path) if self.runtime == DOCKER else None

    def _mount(self, path: Path) -> StudyDatasetMount | None:
        return next((dataset for dataset in self.given.datasets if path.is_relative_to(dataset.mount_path)), None)
