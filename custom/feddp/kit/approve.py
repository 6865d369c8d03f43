"""`feddp kit approve`: writes the line in a hospital's privacy.json without which the hospital accepts no job."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feddp.data.folder import SiteFolder, metadata_of, misfit
from feddp.errors import FedDPError, InputError, PolicyError
from feddp.files import write_json
from feddp.flare.archive import SIGNATURES
from feddp.flare.budget import Ledger
from feddp.flare.configuration import APPS, META, SIDES
from feddp.flare.documents import LARGEST, parsed
from feddp.flare.earlier import require_earlier
from feddp.flare.job_folder import Job, read_folder, require_meta
from feddp.flare.kept import kept_below
from feddp.flare.policy import ANY, SitePolicy
from feddp.flare.scopes import scopes_of
from feddp.kit.budget import counted
from feddp.kit.containers import Containers, kept_root
from feddp.kit.describe import described
from feddp.kit.files import require_owner
from feddp.kit.privacy import privacy_file
from feddp.plan.resolve import build_network
from feddp.reading import read, real
from feddp.sealing.kit import CLIENT as HOSPITAL
from feddp.sealing.kit import Kit, read_json
from feddp.sealing.kit_certificates import certificate_problems
from feddp.sealing.reach import ends


@dataclass(frozen=True)
class Approval:
    """A job's folder, read as a site reads a deployed job, and a hospital's policy."""

    name: str
    scope: str
    job: Job
    kit: Kit
    policy: SitePolicy
    data: Path | None  # the site's folder, if it is on this machine

    @classmethod
    def of(cls, folder: Path, kit: Path) -> "Approval":
        """Reads both.

        Raises:
            FedDPError: the folder is not an exported job, the kit does not belong to a hospital or belongs to another user, or
                its policy is invalid.
        """
        opened = Kit.open(kit)
        require_owner(opened)
        if opened.kind != HOSPITAL:
            raise InputError(f"{kit} is the kit of a {opened.kind}; only hospitals approve jobs, so name a hospital's kit")
        meta, job = read_job(folder)
        privacy = privacy_file(opened)
        scope = scopes_of(privacy).get(meta["scope"])
        if scope is None:
            raise PolicyError(f"{privacy} has no scope {meta['scope']}, which the job needs; add it, or refuse the job")
        policy = SitePolicy.of(opened.name, scope.get("properties"), simulated=False)
        containers = Containers.of(opened)
        data = containers.here(policy.data) if containers else policy.data
        return cls(meta["name"], meta["scope"], job, opened, policy, data if data and data.exists() else None)

    @property
    def privacy(self) -> Path:
        return privacy_file(self.kit)

    @property
    def given(self) -> bool:
        """Whether the policy already approves the job."""
        return self.policy.approves(self.job.plan, self.job.asked)

    @property
    def problems(self) -> list[str]:
        """The reasons why the hospital does not accept the job, approved or not."""
        reasons = self.policy.problems(self.job.plan, self.job.asked)
        if self.policy.private:
            reasons += self.policy.vain(self.job.plan, build_network(self.job.plan))
        if self.data and not self.job.request:
            folder = SiteFolder.open(self.data)
            reasons += self.policy.bounds.too_few(len(folder.rows_of(*self.job.plan.training.trained_on)))
            if differing := misfit(folder, metadata_of(self.job.plan)):
                here, wanted = (f"{n} channels, {', '.join(classes)} ({labels})" for n, classes, labels in differing)
                reasons.append(f"the job is for {wanted}, but {self.data} has {here}; ask its lead to export it for these")
        if self.kit.name not in (self.job.request.sites if self.job.request else self.job.plan.sites):
            reasons.append(f"the job is not for {self.kit.name}; ask its lead to export it for this hospital too")
        if self.policy.approve == ANY and not self.given:  # only an adaptation, and a line has no place beside "any"
            what = f'`approve` is "{ANY}" in {self.privacy}, which does not cover an adaptation'
            reasons.append(f"{what}; write the accepted plans there as a list first, and approve the job then")
        return reasons + self._earlier() + self._spent()

    def _earlier(self) -> list[str]:
        """The reason against a job in the files of the run that it continues, or whose network it takes; where a volume of the
        cluster has them, the site finds it when it gets the job."""
        if not (self.job.resume or self.job.request):
            return []
        try:
            if root := kept_root(self.kit):
                require_earlier(self.kit.name, kept_below(root), self.job, self.policy)
        except FedDPError as error:
            return [str(error)]
        return []

    def _spent(self) -> list[str]:
        """The reason against every further job, if the budget is used up; in a cluster the count is not on this machine."""
        if root := kept_root(self.kit):
            try:
                Ledger(self.kit.name, kept_below(root)).require_left(counted(self.kit, self.policy), self.policy.budget)
            except PolicyError as error:
                return [str(error)]
        return []

    def words(self) -> list[str]:
        """Returns a description of what the job will do at this hospital, and until when it can take part."""
        until = list(map(str, certificate_problems(self.kit))) or ends(self.kit)
        return [*described(self.name, self.job, self.policy, self.data), *until]

    def write(self) -> None:
        """Adds the line to the job's scope. Writes the file atomically and keeps its mode."""
        content = read_json(self.privacy)
        for scope in content["scopes"]:
            if scope["name"] == self.scope:
                properties = scope["properties"]
                line = {"job": self.name, "plan": self.job.plan.digest(self.job.asked)}
                properties["approve"] = [*properties.get("approve", []), line]
        write_json(self.privacy, content, mode=self.privacy.stat().st_mode & 0o777)


def read_job(folder: Path) -> tuple[dict[str, Any], Job]:
    """Returns a job folder's meta.json and the job.

    Raises:
        InputError: the folder is not an exported job, or its two apps have different plans.
    """
    if not (folder / META).is_file():
        raise InputError(f"{folder} is not a job's folder: it has no {META}; name the folder that `feddp job` wrote")
    known = {META, *APPS.values(), *SIGNATURES}  # FLARE's console signs the folder itself when it submits it
    extra = [path.name for path in sorted(folder.iterdir()) if path.name not in known]
    if extra:
        raise InputError(f"{folder} holds {extra[0]!r}, which no exported job has; export the job with `feddp job`")
    job, at_server = (read_folder(side, real(folder / APPS[side], folder)) for side in reversed(SIDES))
    if (at_server.plan, at_server.resume) != (job.plan, job.resume):
        raise InputError(f"{folder}: the server's app has another plan than the sites'; export the job with `feddp job`")
    meta = parsed(META, read(folder / META, LARGEST, folder))
    require_meta(meta, job)
    return meta, job
