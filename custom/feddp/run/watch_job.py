"""A job of a consortium as `feddp watch` sees it: over FLARE's admin session, with the kit of a person who may see it.

FLARE says how the job as a whole stands, and which sites are connected. The rest the job's server tells
(`feddp.flare.persistor`): it has it from the sites' answers, so nothing more leaves a site. FLARE gives it to those who may
download the job's results (`feddp.provision.AUTHORIZATION`), and asks no site.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from nvflare.apis.job_def import JobMetaKey, RunStatus
from nvflare.fuel.flare_api.api_spec import JobNotFound, JobNotRunning
from nvflare.fuel.flare_api.flare_api import Session

from feddp.errors import InputError
from feddp.flare.admin_session import is_final, opened_session, session_errors
from feddp.flare.persistor import STANDING, STATS
from feddp.reading import is_count, is_name, is_number, is_text
from feddp.reporting.standing import RUNNING
from feddp.run.watch import Look, Watched
from feddp.sealing.kit import ADMIN, Kit
from feddp.sealing.kit_certificates import require_certificates
from feddp.sealing.reach import ends


class WatchedJob(Watched):
    """A job of the server that a person's session reaches."""

    def __init__(self, session: Session, id: str):
        self.session, self.id = session, id
        self._latest: dict[str, Any] = {}

    def look(self) -> Look:
        with _asked(f"job {self.id}"):
            meta = _told(self.session.get_job_meta(self.id), JobMetaKey.STATUS.value)
            status = str(meta[JobMetaKey.STATUS.value])
            if status == RunStatus.RUNNING.value:
                self._latest = self._standing() or self._latest
                return Look(RUNNING, self._latest or {"notes": self._absent()})
            if not is_final(status):
                return Look(f"job {self.id}: {status.lower()}", {"notes": self._absent()})
        detail = meta.get(JobMetaKey.JOB_DEPLOY_DETAIL.value)
        replies = (str(line).partition(": ") for line in (detail if isinstance(detail, list) else ()))
        refused = [f"{site}: {said}" for site, _, said in replies if said != "OK"]
        summary = self._latest | {"notes": [*self._latest.get("notes", []), *refused]}
        completed = status == RunStatus.FINISHED_COMPLETED.value
        failure = "" if completed else f"job {self.id} ended {status}; {'; '.join(refused) or 'read log.txt of the server'}"
        how = "finished" if completed else status
        return Look(how if self._latest else f"job {self.id}: {how}", summary, True, failure)

    def _standing(self) -> dict[str, Any]:
        """Returns what the job's server tells; nothing while its process starts or ends."""
        try:
            told: Any = self.session.show_stats(self.id, "server")
        except (JobNotRunning, JobNotFound):
            return {}
        for name in ("server", STATS, STANDING):
            if isinstance(told, dict) and name not in told:
                return {}
            told = told[name] if isinstance(told, dict) else None
        if not _is_summary(told):
            raise InputError(f"the server told of job {self.id} what no server of FedDP tells")
        return dict(told)

    def _absent(self) -> list[str]:
        joined = [client.name for client in self.session.get_system_info().client_info]
        return [f"connected sites: {', '.join(sorted(joined)) or 'none'}"]


def job_of(session: Session, id: str = "") -> WatchedJob:
    """Returns the job `id`, or without an id the one that is under way.

    Raises:
        InputError: there is no such job, or no id was given and not one job is under way.
    """
    with _asked("the list of jobs"):
        jobs = [_told(job, "job_id", JobMetaKey.STATUS.value) for job in session.list_jobs(id_prefix=id or None)]
    ids = [str(job["job_id"]) for job in jobs if id or not is_final(job[JobMetaKey.STATUS.value])]
    if len(ids) != 1:
        what = f"{id}: there is not one job whose id begins so" if id else "not one job is under way"
        raise InputError(f"{what} (there: {', '.join(ids) or 'none'}); name a job's id")
    return WatchedJob(session, ids[0])


_ROW: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("state", "why"), is_text),
    "since": is_number,
    **dict.fromkeys(("loss", "dice"), lambda value: value is None or is_number(value)),
    **dict.fromkeys(("received", "sent"), is_count),
}


def _told(meta: Any, *names: str) -> dict[str, Any]:
    """Returns what the server tells of a job; raises InputError if one of these texts is missing."""
    if not isinstance(meta, dict) or not all(is_text(meta.get(name)) for name in names):
        raise InputError("the server told of a job what no server of FLARE tells")
    return meta


def _is_sites(value: Any) -> bool:
    return isinstance(value, dict) and all(is_name(site) and _is_whole(row, _ROW) for site, row in value.items())


_SUMMARY: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("method", "network", "task", "of"), is_text),
    **dict.fromkeys(("round", "rounds"), is_count),
    "seconds_left": lambda value: value is None or is_number(value),
    "rough": lambda value: isinstance(value, bool),
    "sites": _is_sites,
    "notes": lambda value: isinstance(value, list) and all(map(is_text, value)),
}


def _is_summary(value: Any) -> bool:
    """Whether it is what `Standing.summary` returns: a server's operator may have changed what his server tells."""
    return _is_whole(value, _SUMMARY)


def _is_whole(value: Any, parts: Mapping[str, Callable[[Any], bool]]) -> bool:
    return isinstance(value, dict) and all(name in value and fits(value[name]) for name, fits in parts.items())


def certificates(kit: Kit) -> list[str]:
    """Returns until when the certificates are valid of the person whose kit it is, of the root, and of the server.

    Raises:
        FedDPError: the kit is not a person's, or its certificate is not valid.
    """
    if kit.kind != ADMIN:
        raise InputError(f"{kit.folder} is the kit of a {kit.kind}; jobs are watched with a person's kit")
    require_certificates(kit)
    return ends(kit)


@contextmanager
def opened(kit: Kit) -> Iterator[Session]:
    """Yields a session of the person whose kit it is.

    Raises:
        FedDPError: the server does not let the person in.
    """
    with _asked(kit.name):
        session = opened_session(kit.name, kit.folder)
    with closing(session):
        yield session


def _asked(what: str) -> Any:
    return session_errors(f"the server did not tell {what}", "is it running, and may this person see this job?")
