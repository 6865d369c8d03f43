"""Whether a site's files of an earlier run allow a job that goes on with the run, or that takes its network."""

from pathlib import Path

from feddp.errors import PolicyError
from feddp.flare.job_folder import Job
from feddp.flare.kept import JOB_ID, files_of
from feddp.flare.policy import SitePolicy
from feddp.flare.terms import require_as_private, require_no_wider
from feddp.flare.unused import require_not_removed
from feddp.training.claim import require_stored_plan


def require_earlier(site: str, kept: Path, job: Job, policy: SitePolicy) -> None:
    """Writes nothing, and returns where the site has no such files: it was absent so far.

    Args:
        kept: the folder of the site's files of all runs.

    Raises:
        PolicyError: the site has removed the run; the run has another plan; the policy now gives more of it than when it began;
            or the files that say so are damaged. The text names a file.
    """
    if job.request:
        require_as_private(files_of(kept, job.request.job), policy)
    if job.resume:
        if not JOB_ID.fullmatch(job.resume):
            raise PolicyError("the run that it continues does not have the form of FLARE's job ids")
        require_not_removed(site, kept, job.resume)
        require_stored_plan(files_of(kept, job.resume), job.plan.to_json())
        require_no_wider(files_of(kept, job.resume), policy)
