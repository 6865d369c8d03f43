"""A site's policy, read from the properties of the job's scope in the site's privacy.json."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feddp.adaptation.choices import read_settings
from feddp.errors import PolicyError
from feddp.flare.bounds import Bounds
from feddp.methods import METHODS, base
from feddp.networks import NETWORKS
from feddp.partition import ROLES, select
from feddp.plan.schema import Plan
from feddp.protocol import CONSENTS, SPECTRA

if TYPE_CHECKING:  # a process that waits for jobs does not import torch
    from torch import nn

SIMULATED_POLICIES = "FEDDP_SIMULATED"
OWN, PLAN = SEEDS = ("own", "plan")
KEYS = {"data", "device", "consent", "recipients", "private", "methods", "spectra", "min_images", "threads"}
KEYS |= {"approve", "networks", "tensors", "bounds", "std_images", "budget", "seed", "keep_days", "senders"}
ANY = "any"
_SHA = r"[0-9a-f]{64}"


@dataclass(frozen=True)
class Budget:
    """Limits for all jobs together on one data folder: the number of jobs, and of results with measured numbers or
    a round's shared tensors."""

    jobs: int = 20
    evaluations: int = 10_000


@dataclass(frozen=True)
class SitePolicy:
    """The site's data folder and device, the jobs it accepts and the exchanges it consents to.

    Args:
        data: the folder with the site's images.
        consent: "calibration": the site exchanges its personal tensors with the other consenting sites; "spectra": the same
            for centres of mean amplitude spectra of its patients' images (FedDG); "outside": the site gives its finished
            network to an unseen site, and receives other sites' networks if it is the unseen site itself. The job may then
            also ask it for the mean metrics of its masks (`job-outside --score`).
        recipients: the sites that may read the tensors given by this site; None: all the job's sites.
        private: roles (feddp.partition) that this site never shares, in addition to the method's private tensors.
        methods: the accepted methods; None: any. `networks` is the same for networks.
        spectra: the largest number of mean spectra that a job may ask for.
        min_images: means over fewer images, cases or, for spectra, patients do not leave; `std_images` is the same for
            standard deviations.
        approve: the digests of the accepted plans (`Plan.digest`), or "any". `bounds` apply in both cases.
        tensors: SHA-256 of the accepted initial tensors.
        budget: limits for all jobs on the data.
        seed: "own": order, augmentation and dropout also depend on the site's secret; "plan": only on the job's seed.
        keep_days: a run's folder in which nothing was modified for so many days is removed (`feddp.flare.unused`);
            None: never, because the folder has the site's own network.
        senders: the sites whose tensors this site uses in an exchange; None: all the job's sites. It has no part in the
            rounds: the server's mean has every site's tensors.
    """

    data: Path
    device: str = "cpu"
    consent: tuple[str, ...] = ()
    recipients: tuple[str, ...] | None = None
    private: tuple[str, ...] = ()
    methods: tuple[str, ...] | None = None
    spectra: int = 16
    min_images: int = 5
    threads: int = 1  # CPU threads; with one thread, results are bit-equal on machines of one kind
    approve: tuple[str, ...] | str = ()
    networks: tuple[str, ...] | None = None
    tensors: tuple[str, ...] = ()
    bounds: Bounds = Bounds()
    std_images: int = 20
    budget: Budget = Budget()
    seed: str = OWN
    keep_days: int | None = None
    senders: tuple[str, ...] | None = None

    @classmethod
    def of(cls, site: str, properties: Mapping[str, Any] | None, simulated: bool) -> "SitePolicy":
        """Reads a site's policy from its scope's properties.

        FLARE's simulator applies no scopes. Only there, the environment variable FEDDP_SIMULATED holds the same properties,
        as JSON {site: properties}.

        Raises:
            PolicyError: there is no policy, or it has a wrong key or value.
        """
        if not properties and simulated:
            properties = json.loads(os.environ.get(SIMULATED_POLICIES, "{}")).get(site)
            if not properties:
                raise PolicyError(
                    f"the simulator has no policy for site {site}; start it with `feddp run`, or set {SIMULATED_POLICIES}"
                )
        if not properties:
            raise PolicyError(
                f"site {site}: its privacy.json has no properties for the job's scope, so the site has no policy for it;"
                " write local/privacy.json with a scope of that name"
            )
        if not isinstance(properties, Mapping):
            raise PolicyError(f"site {site}: privacy.json's properties are {properties!r}; write an object of names and values")
        if unknown := sorted(properties.keys() - KEYS):
            raise PolicyError(f"site {site}: privacy.json has unknown properties {unknown}; known: {sorted(KEYS)}")
        if "data" not in properties:
            raise PolicyError(f"site {site}: privacy.json does not name the data folder; add the property `data`")
        return cls(
            _folder(site, properties["data"]),
            _device(site, properties.get("device", cls.device)),
            _words(site, "consent", properties.get("consent", []), CONSENTS),
            _sites(site, "recipients", properties),
            _words(site, "private", properties.get("private", []), ROLES),
            _words(site, "methods", properties["methods"], tuple(METHODS)) if "methods" in properties else None,
            _count(site, "spectra", properties.get("spectra", cls.spectra), 0, "mean spectra"),
            _count(site, "min_images", properties.get("min_images", cls.min_images), 1, "images"),
            _count(site, "threads", properties.get("threads", cls.threads), 1, "CPU threads"),
            _approved(site, properties.get("approve", [])),
            _words(site, "networks", properties["networks"], tuple(NETWORKS)) if "networks" in properties else None,
            _hashes(site, properties.get("tensors", [])),
            Bounds.of(site, properties.get("bounds", {})),
            std_images=_count(site, "std_images", properties.get("std_images", cls.std_images), 1, "images"),
            budget=_budget(site, properties.get("budget", {})),
            seed=_seed(site, properties.get("seed", cls.seed)),
            keep_days=_count(site, "keep_days", properties["keep_days"], 1, "days") if "keep_days" in properties else None,
            senders=_sites(site, "senders", properties),
        )

    @staticmethod
    def admitting(plan: Plan) -> dict[str, Any]:
        """Returns properties that accept only this plan: for runs in which one person owns all sites."""
        approve, bounds = [{"job": plan.method, "plan": plan.digest()}], Bounds.admitting(plan)
        tensors = [plan.weights] if plan.weights else []
        return {"approve": approve, **({"bounds": bounds} if bounds else {}), **({"tensors": tensors} if tensors else {})}

    def consents(self, word: str) -> bool:
        return word in self.consent

    def accept(self, site: str, plan: Plan, request: Mapping[str, Any] | None = None) -> None:
        """Raises PolicyError if this site does not accept the job.

        Args:
            request: for an adaptation at an unseen site, `AdaptationRequest.to_json`; `plan` is then the finished run's.
        """
        if problems := self.problems(plan, request):
            raise PolicyError(f"site {site}: {problems[0]}")
        if not self.approves(plan, request):
            raise PolicyError(
                f"site {site}: its administrator has not approved plan {plan.digest(request)[:12]} ({plan.method});"
                " send the job's folder to the site for `feddp kit approve JOB_FOLDER KIT`, then submit again"
            )

    def approves(self, plan: Plan, request: Mapping[str, Any] | None = None) -> bool:
        """Whether the site approved the job. "any" covers only plans, which `bounds` and `tensors` limit: no bound limits the
        models that an adaptation brings."""
        return (self.approve == ANY and request is None) or plan.digest(request) in self.approve

    def problems(self, plan: Plan, request: Mapping[str, Any] | None = None) -> list[str]:
        """Returns the reasons against a job, approved or not: each names the setting, its bound and the remedy."""
        reasons = []
        for what, value, taken in (("methods", plan.method, self.methods), ("networks", plan.network, self.networks)):
            if taken is not None and value not in taken:
                reasons.append(
                    f"its policy accepts the {what}: {', '.join(taken) or 'none'}, but the job uses {value};"
                    f" add it to `{what}` in privacy.json, or leave this site out"
                )
        if request is not None:
            # only the donors' models are adapted, without masks; who approves the job trusts the γ that it brings
            return reasons + self.bounds.adaptation(asdict(read_settings(request.get("settings", {}))))
        asked = plan.hyper.spectra if base.SPECTRA in plan.stages and self.consents(SPECTRA) else 0
        if asked > self.spectra:
            reasons.append(
                f"the job asks for {asked} mean spectra, but its policy allows at most {self.spectra};"
                f" export the job with --set spectra={self.spectra}, or raise `spectra` in privacy.json"
            )
        if plan.weights and plan.weights not in self.tensors:
            reasons.append(
                f"the job brings initial tensors ({plan.weights}); crafted tensors can copy an image into what the site"
                " sends; leave --weights out, or add their SHA-256 to `tensors` in privacy.json"
            )
        return reasons + self.bounds.problems(plan)

    def vain(self, plan: Plan, network: "nn.Module") -> list[str]:
        """Returns a reason against a job whose network has no tensor of a role in `private`."""
        if not (without := [role for role in self.private if not select(network, role)]):
            return []
        what = f"its policy keeps {', '.join(without)} private, but the job's {plan.network} has no such tensor"
        return [f"{what}, so the policy would protect nothing; leave this site out, or change `private` in privacy.json"]


def _folder(site: str, given: Any) -> Path:
    if not isinstance(given, str) or not given:
        raise PolicyError(f"site {site}: privacy.json's data is {given!r}; write the path of the site's folder")
    return Path(given)


def _device(site: str, given: Any) -> str:
    if not isinstance(given, str) or not re.fullmatch(r"cpu|cuda(:[0-9]+)?", given):
        raise PolicyError(f"site {site}: privacy.json's device is {given!r}; write cpu, cuda or cuda:N")
    return given


def _words(site: str, name: str, given: Any, known: tuple[str, ...]) -> tuple[str, ...]:
    if not isinstance(given, list) or not all(isinstance(word, str) and word in known for word in given):
        raise PolicyError(f"site {site}: privacy.json's {name} is {given!r}; write a list of {', '.join(known)}")
    return tuple(given)


def _sites(site: str, name: str, properties: Mapping[str, Any]) -> tuple[str, ...] | None:
    if name not in properties:
        return None
    given = properties[name]
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise PolicyError(f"site {site}: privacy.json's {name} is {given!r}; write a list of sites, or leave it out")
    return tuple(given)


def _count(site: str, name: str, given: Any, least: int, what: str) -> int:
    if type(given) is not int or given < least:
        raise PolicyError(f"site {site}: privacy.json's {name} is {given!r}; write a number of {what}, at least {least}")
    return given


def _approved(site: str, given: Any) -> tuple[str, ...] | str:
    if given == ANY:
        return ANY
    listed: list[Any] = given if isinstance(given, list) else [None]
    if not all(isinstance(line, Mapping) and line.keys() == {"job", "plan"} for line in listed) or not all(
        isinstance(line["job"], str) and re.fullmatch(_SHA, str(line["plan"])) for line in listed
    ):
        raise PolicyError(
            f'site {site}: privacy.json\'s approve is {given!r}; write "any", or a list of {{"job": name, "plan": SHA-256}},'
            " which `feddp kit approve JOB_FOLDER KIT` writes"
        )
    return tuple(line["plan"] for line in listed)


def _hashes(site: str, given: Any) -> tuple[str, ...]:
    if not isinstance(given, list) or not all(isinstance(value, str) and re.fullmatch(_SHA, value) for value in given):
        raise PolicyError(f"site {site}: privacy.json's tensors is {given!r}; write a list of SHA-256 in hex")
    return tuple(given)


def _budget(site: str, given: Any) -> Budget:
    known = vars(Budget())
    if not isinstance(given, Mapping) or not given.keys() <= known.keys():
        raise PolicyError(f"site {site}: privacy.json's budget is {given!r}; write {json.dumps(known)} with your own numbers")
    return Budget(**{name: _count(site, f"budget's {name}", value, 1, name) for name, value in given.items()})


def _seed(site: str, given: Any) -> str:
    if given not in SEEDS:
        raise PolicyError(f"site {site}: privacy.json's seed is {given!r}; write {' or '.join(SEEDS)}")
    return str(given)
