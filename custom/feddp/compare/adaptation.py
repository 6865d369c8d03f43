"""One adaptation of a finished run to a site outside, kept inside the run's folder: a run made anew loses it too.

<run>/outside/<site>/<way and what is changed of it>/    what `feddp adapt --score` leaves
"""

import json
import shutil
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from feddp.adaptation import unseen_site
from feddp.adaptation.adapt import Settings
from feddp.adaptation.models import read_models
from feddp.compare.results import Images
from feddp.data.folder import SiteFolder
from feddp.data.images import SPLIT
from feddp.errors import InputError
from feddp.files import ADAPTED, SCORES
from feddp.training.device import asked_for
from feddp.training.metrics import METRICS


@dataclass(frozen=True)
class Adaptation:
    """Of the finished run `run` to the test images of the site's folder `site`, by a strategy of STRATEGIES."""

    run: Path
    site: Path
    how: str
    settings: Settings

    def __str__(self) -> str:
        variant, _, campaign = list(self.run.parents)[:3]
        return f"{campaign.name}: {variant.name}, seed {self.settings.seed}, {self.name} to {self.site.name}"

    @property
    def name(self) -> str:
        """The way, with what differs from the defaults; the seed is the run's."""
        default = asdict(Settings(seed=self.settings.seed))
        changed = {key: value for key, value in asdict(self.settings).items() if value != default[key]}
        return "".join([self.how, *(f"@{key}={value}" for key, value in changed.items())])

    @property
    def folder(self) -> Path:
        return self.run / "outside" / self.site.name / self.name

    def is_finished(self) -> bool:
        """Whether it was done in the same way, on the images that the site's split names."""
        try:
            done, images = self._read(ADAPTED), self._read(SCORES)["images"]
            way = done["how"], done["settings"]
        except (OSError, ValueError, KeyError):  # not there, half written, or of another version
            return False
        stems = {row.image for row in SiteFolder.open(self.site).rows_of(SPLIT)}
        return (*way, images.keys()) == (self.how, asdict(self.settings), stems)

    def execute(self, device: str) -> None:
        """InputError where the models or the images do not let it."""
        shutil.rmtree(self.folder, ignore_errors=True)  # of an interrupted attempt, or of another split
        request = unseen_site.Request(self.how, self.settings, score=True)
        where = asked_for(device)
        unseen_site.adapt(read_models(self.run), str(self.run), self.site, self.folder, request, where)

    @cached_property
    def images(self) -> Images:
        """The metrics of every image."""
        try:
            images = self._read(SCORES)["images"]
            return {stem: {metric: float(row[metric]) for metric in METRICS} for stem, row in images.items()}
        except (OSError, ValueError, KeyError) as error:
            raise InputError(f"{self.folder} holds no scores ({error!r}); remove it, it will be made again") from None

    @property
    def seconds(self) -> float:
        """A sample's, of adaptation, prediction and writing."""
        return float(self._read(ADAPTED)["seconds_per_image"])

    def _read(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder / name).read_text(encoding="utf-8"))
