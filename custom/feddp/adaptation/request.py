"""The request of an adaptation job, beside the finished run's plan: the unseen site, the donors of the models, the strategy."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from feddp.adaptation.choices import ROUTING, AdaptationOptions, Settings, read_settings
from feddp.data.names import require_sites
from feddp.errors import InputError
from feddp.training.claim import require_job_id
from feddp.training.settings import require_name


@dataclass(frozen=True)
class AdaptationRequest:
    """The donors give their networks of the finished job `job` to the unseen site, which adapts them by the strategy `how`.

    Raises:
        InputError: a name or the job's id is not valid, the strategy is unknown, or a setting is unknown or out of range.
    """

    newcomer: str
    donors: tuple[str, ...]
    job: str
    how: str = ROUTING
    settings: dict[str, Any] = field(default_factory=dict)  # feddp.adaptation.fitting.Settings that differ from the defaults
    score: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.donors, list | tuple) or not self.donors:
            raise InputError(f"donors={self.donors!r} is not a list of sites; name a donor")
        for site in self.sites:
            require_name("newcomer" if site is self.newcomer else "donors", site)
        require_sites(self.sites)
        if len(set(self.sites)) < len(self.sites):
            raise InputError(f"newcomer={self.newcomer} donors={','.join(self.donors)}: a site is named twice; correct them")
        require_job_id(self.job)
        if not isinstance(self.how, str) or type(self.score) is not bool or not isinstance(self.settings, Mapping):
            raise InputError("how must be a text, settings an object of names and values, score true or false; correct them")
        object.__setattr__(self, "donors", tuple(sorted(self.donors)))
        values = asdict(self.request.settings)
        changed = {name: value for name, value in values.items() if value != getattr(Settings(), name)}
        object.__setattr__(self, "settings", changed)

    @property
    def sites(self) -> tuple[str, ...]:
        return self.newcomer, *self.donors

    @property
    def request(self) -> AdaptationOptions:
        """The strategy and its settings, as the unseen site runs them."""
        return AdaptationOptions(self.how, read_settings(self.settings), self.score)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "AdaptationRequest":
        """Returns the request in a job's JSON; raises InputError if a key is missing or unknown, or a value is out of range."""
        known = {f.name for f in fields(cls)}
        if not isinstance(data, Mapping) or not {"newcomer", "donors", "job"} <= data.keys() <= known:
            raise InputError(f"the adaptation request has other keys than {sorted(known)}; export it with `feddp job-outside`")
        return cls(**data)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"donors": list(self.donors)}
