"""Checks a kit prepared for containers (`nvflare deploy prepare`): the containers of jobs must fit the participant's policy."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvflare.apis.fl_constant import WorkspaceConstants
from nvflare.apis.job_def import DEFAULT_STUDY
from nvflare.app_opt.job_launcher.study_data import StudyDatasetMount
from nvflare.app_opt.job_launcher.study_runtime import StudyRuntime, load_study_runtime_file

from feddp.errors import BadFile, Problem
from feddp.kit.files import open_to_all
from feddp.limits import CONFIG_BYTES
from feddp.reading import opened, shown
from feddp.sealing.kit import Kit, components

DOCKER, KUBERNETES = "docker", "k8s"  # FLARE's names
LAUNCHERS = {f"nvflare.app_opt.job_launcher.{runtime}_launcher.": runtime for runtime in (DOCKER, KUBERNETES)}
RESULTS = WorkspaceConstants.ENV_VAR_RESULT_ROOT
SEE = "See the documentation, 'Run a site in Docker or Kubernetes'"
# the options of a container that a site may set; others could replace the image's code or give it access to the machine
PYTHON = (None, "/usr/local/bin/python", "/usr/local/bin/python3")
ENVIRONMENT = {RESULTS, WorkspaceConstants.ENV_VAR_AUDIT_ROOT, WorkspaceConstants.ENV_VAR_LOG_ROOT}
ENVIRONMENT |= {"CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TZ"}
OPTIONS = {"device_requests", "cap_drop", "security_opt", "read_only"}
HARDENING = {"no-new-privileges", "no-new-privileges:true"}
OPTIONS |= {"shm_size", "mem_limit", "nano_cpus", "cpuset_cpus", "pids_limit"}


def runtime(kit: Kit) -> str | None:
    """Returns where the kit's jobs run: `DOCKER`, `KUBERNETES`, or None for processes beside the parent process."""
    paths = [str(component.get("path", "")) for component in components(kit.effective("resources.json"))]
    return next((name for prefix, name in LAUNCHERS.items() if any(path.startswith(prefix) for path in paths)), None)


@dataclass(frozen=True)
class Containers:
    """A participant's settings for the containers of jobs: of each study, from `file`, and of the launcher, for all."""

    runtime: str
    file: Path
    studies: dict[str, StudyRuntime]
    launcher: dict[str, Any]  # its arguments
    resources: Path  # the file that has the launcher

    @classmethod
    def of(cls, kit: Kit) -> "Containers | None":
        """Reads the kit's settings; returns None if it was not prepared for containers.

        Raises:
            BadFile: FLARE would refuse its local/study_runtime.yaml, or that is no regular file.
        """
        if (mode := runtime(kit)) is None:
            return None
        file = kit.folder / "local" / "study_runtime.yaml"
        try:
            opened(file, CONFIG_BYTES).close()  # FLARE would wait for a pipe
            studies = load_study_runtime_file(str(file), launcher_mode=mode)
        except (FileNotFoundError, ValueError) as error:
            raise BadFile(Problem(file, f"is not accepted by FLARE ({error})", SEE)) from error
        resources = kit.effective("resources.json")
        (launcher, *_) = [c for c in components(resources) if str(c.get("path")).startswith(tuple(LAUNCHERS))]
        arguments = _object(resources, "args", launcher)
        for name in ("default_job_env", "default_job_container_kwargs"):
            _object(resources, name, arguments)
        return cls(mode, file, studies, arguments, resources)

    @property
    def given(self) -> StudyRuntime:
        """The settings for FedDP's jobs."""
        return self.studies.get(DEFAULT_STUDY) or StudyRuntime(DEFAULT_STUDY)

    def problems(self) -> list[Problem]:
        """Returns the `faults`, and the first file below the kept folder, if it is of this machine, that all users may change:
        another user could lay a secret of theirs there, or replace a run's files."""
        mount = self._kept_mount()
        return self.faults() + (open_to_all(Path(mount.source)) if mount and self.runtime == DOCKER else [])

    def faults(self) -> list[Problem]:
        """Returns the faults of the settings: code, a missing image, files of a run that would not outlive the container."""
        problems = [*self._code()]
        if not self.given.container_image:
            remedy = f"Name it as studies.{DEFAULT_STUDY}.container.image; jobs that name an image are refused"
            problems.append(Problem(self.file, "names no image for jobs", remedy))
        mount = self._kept_mount()
        if mount is None:
            kept = self.given.env.get(RESULTS)
            what = f"keeps no files of a job: {RESULTS} is {kept!r}, which is not a dataset mounted for writing"
            problems.append(Problem(self.file, what, SEE))
        elif self.runtime == DOCKER and not Path(mount.source).is_dir():
            problems.append(Problem(Path(mount.source), "is not a folder, but jobs write there", "Create it"))
        return problems

    def kept(self) -> Path | None:
        """Returns this machine's folder for the files that outlive a job; None: they are in a volume of the cluster.

        Raises:
            BadFile: no files outlive a job.
        """
        if problems := self.faults():
            raise BadFile(problems[0])
        return self.here(Path(self.given.env[RESULTS]))

    def _code(self) -> Iterator[Problem]:
        """Yields settings that run other code than the image's or give it access to the machine."""
        launcher = self.launcher
        if launcher.get("config_file_path") is not None or launcher.get("study_data_pvc_file_path") is not None:
            yield Problem(self.resources, "makes the launcher read a file outside the kit", "Write null for it")
        for key in ("default_python_path", "python_path"):
            if launcher.get(key) not in PYTHON:
                yield Problem(self.resources, f"starts jobs with {launcher[key]!r}", f"Write {PYTHON[1]}")
        chosen = [(self.resources, launcher.get("default_job_env"), launcher.get("default_job_container_kwargs"))]
        chosen += [(self.file, study.env, study.docker_kwargs) for study in self.studies.values()]
        for file, environment, options in chosen:
            for word in sorted({*(environment or {})} - ENVIRONMENT | {*(options or {})} - OPTIONS):
                yield Problem(file, f"gives containers {word}, which the check does not know", f"Remove it. {SEE}")
            security = (options or {}).get("security_opt") or []
            if not isinstance(security, list) or {*map(str, security)} - HARDENING:
                what = f"gives containers security_opt {security!r}"
                yield Problem(file, what, f"Allowed are {' and '.join(sorted(HARDENING))}")
        for study in self.studies.values():
            for mount in study.datasets:
                if not mount.read_only and study.env.get(RESULTS) not in (None, mount.mount_path):
                    what = f"mounts {mount.source} for writing, which is not the folder for the files of runs ({RESULTS})"
                    yield Problem(self.file, what, "Mount it read-only")
                if self.runtime == DOCKER and (Path(mount.source) == Path("/") or Path(mount.source).is_socket()):
                    yield Problem(
                        self.file, f"mounts {mount.source}, which gives jobs access to the machine", "Name the data folder"
                    )
            if study.pod_template or study.secret_env or study.secret_mounts:
                what = f"gives containers of study {study.study} a pod template or secrets, which the check does not know"
                yield Problem(self.file, what, f"Remove them. {SEE}")

    def here(self, data: Path) -> Path | None:
        """Returns this machine's folder that jobs see as `data`; None: it is in a volume of the cluster.

        Raises:
            BadFile: no container sees `data`.
        """
        mount = self._mount(data)
        if mount is None:
            where = ", ".join(dataset.mount_path for dataset in self.given.datasets) or "none"
            what = f"does not mount {data}, which privacy.json names as `data` (jobs see: {where})"
            raise BadFile(Problem(self.file, what, SEE))
        return Path(mount.source) / data.relative_to(mount.mount_path) if self.runtime == DOCKER else None

    def _kept_mount(self) -> StudyDatasetMount | None:
        """Returns the dataset in which jobs keep their files, if it is mounted for writing."""
        kept = self.given.env.get(RESULTS)
        mount = self._mount(Path(kept)) if kept else None
        return None if mount is None or mount.read_only else mount

    def _mount(self, path: Path) -> StudyDatasetMount | None:
        return next((dataset for dataset in self.given.datasets if path.is_relative_to(dataset.mount_path)), None)


def _object(file: Path, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the JSON object `name` of a launcher's settings, {} if there is none; raises BadFile for another value."""
    found = settings.get(name) or {}
    if not isinstance(found, dict):
        raise BadFile(Problem(file, f"has a launcher whose {name} are {shown(found)}, no JSON object", SEE))
    return found


def kept_root(kit: Kit) -> Path | None:
    """Returns this machine's folder below which the site's jobs keep their files; None: a volume of the cluster has them.

    Raises:
        BadFile: the jobs run in containers, and no files outlive a job.
    """
    containers = Containers.of(kit)
    return kit.folder if containers is None else containers.kept()
