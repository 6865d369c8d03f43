"""What is done with a finished run's models at a site that did not train: an adaptation without labels, or `feddp join`.

<run>/outside/<site>/<strategy and changed settings>/
        what `feddp adapt --score` or `feddp join` leaves; it is inside the run's folder, so that a run that is run again loses
        it too
"""

import shutil
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from feddp.adaptation import unseen_site
from feddp.adaptation.choices import AdaptationOptions, Settings
from feddp.adaptation.models import read_models
from feddp.compare.scores import FINAL, IMAGE, Rows, read_table
from feddp.data.folder import SiteFolder
from feddp.data.images import SPLIT
from feddp.errors import BadFile, InputError
from feddp.files import ADAPTED, IMAGES, RESULTS, SCORES
from feddp.limits import RESULTS_BYTES
from feddp.methods.base import STAGES, TUNE
from feddp.reading import read_json
from feddp.run import join
from feddp.training.columns import METRICS, class_names, columns
from feddp.training.device import asked_for
from feddp.training.settings import Tuning


@dataclass(frozen=True)
class Adaptation:
    """An adaptation of the finished run `run` to the test images of the site's folder `site`, by a strategy of STRATEGIES."""

    run: Path
    site: Path
    strategy: str
    settings: Settings

    @property
    def selections(self) -> set[str]:
        """None: whichever split chose the rounds inside, no image of the unseen site has chosen anything."""
        return set()

    @property
    def name(self) -> str:
        variant, _, campaign = list(self.run.parents)[:3]
        return f"{campaign.name}: {variant.name}, seed {self.settings.seed}, {self.folder.name} to {self.site.name}"

    @property
    def folder(self) -> Path:
        """Its name is the strategy with the settings that differ from the defaults; the seed is the run's."""
        default = asdict(Settings(seed=self.settings.seed))
        changed = {key: value for key, value in asdict(self.settings).items() if value != default[key]}
        name = "".join([self.strategy, *(f"@{key}={value}" for key, value in changed.items())])
        return self.run / "outside" / self.site.name / name

    def is_finished(self) -> bool:
        """Whether it was made with the same strategy and settings, on the images that the site's split names."""
        try:
            done, images = self._read(ADAPTED), self._read(SCORES)["images"]
            made = done["how"], done["settings"], images.keys()
        except (OSError, ValueError, KeyError, BadFile):  # not there, half written, or of another version
            return False
        return made == (self.strategy, asdict(self.settings), self._stems())

    def execute(self, device: str) -> None:
        """InputError where the models or the images do not allow it."""
        shutil.rmtree(self.folder, ignore_errors=True)  # of an interrupted attempt, or of another split
        request = AdaptationOptions(self.strategy, self.settings, score=True)
        unseen_site.adapt(read_models(self.run), str(self.run), self.site, self.folder, request, asked_for(device))

    @cached_property
    def images(self) -> Rows:
        """The metrics of every image, of each class too if there are several."""
        try:
            images = self._read(SCORES)["images"]
            names = {stem: columns(METRICS, class_names(row)) for stem, row in images.items()}
            return {stem: {name: float(row[name]) for name in names[stem]} for stem, row in images.items()}
        except (OSError, ValueError, KeyError, BadFile) as error:
            raise InputError(f"{self.folder} holds no scores ({error!r}); remove it, it will be made again") from None

    @property
    def seconds(self) -> float:
        """Seconds per image: adaptation, prediction and writing."""
        return float(self._read(ADAPTED)["seconds_per_image"])

    def _stems(self) -> set[str]:
        return {row.image for row in SiteFolder.open(self.site).rows_of(SPLIT)}

    def _read(self, name: str) -> dict[str, Any]:
        content: dict[str, Any] = read_json(self.folder / name, RESULTS_BYTES, self.folder)
        return content


@dataclass(frozen=True)
class Joining(Adaptation):
    """Local post-training with labels at the site: the encoder stays, decoder and head are tuned (`feddp join`)."""

    epochs: int

    @property
    def selections(self) -> set[str]:
        """The split of the unseen site whose IoU chose the epoch."""
        return {str(self._read(RESULTS)["selection"])}

    @property
    def folder(self) -> Path:
        folder = super().folder
        return folder if self.epochs == Tuning().tune_epochs else folder.with_name(f"{folder.name}@epochs={self.epochs}")

    def is_finished(self) -> bool:
        try:
            return "joined" in self._read(RESULTS) and self.images.keys() == self._stems()
        except (OSError, ValueError, InputError):  # not there, half written, or of another version
            return False

    def execute(self, device: str) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)  # of an interrupted attempt, or of another split
        self.__dict__.pop("images", None)  # of that attempt
        join.join(self.run, self.site, self.folder, epochs=self.epochs, seed=self.settings.seed, device=device)

    @cached_property
    def images(self) -> Rows:
        return read_table(self.folder / IMAGES, IMAGE, FINAL, STAGES[TUNE])
