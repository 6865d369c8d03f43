"""What a comparison is asked for."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from feddp.compare.runs import Place
from feddp.compare.studies import OUTSIDE, STUDIES
from feddp.compare.variants import Common
from feddp.errors import InputError
from feddp.files import RESULTS
from feddp.training.device import dealt

ENVIRONMENTS = ("local", "sim")  # a POC is one deployment, not a place for many runs


@dataclass(frozen=True)
class ComparisonRequest:
    """What to compare.

    Args:
        methods: variants, as `Variant.parse` reads them.
        studies: names in STUDIES.
        unseen: the folder of an unseen site, on which the networks of `methods` are measured.
        place: where the runs run; its first device also measures.
        command: the command line, for the record.
        outside: names in OUTSIDE, with every site in turn unseen.
        folds: into how many parts each site's patients are dealt, each part the test split once; 0: the sites' own split.

    Raises:
        InputError: nothing is asked for, something is unknown or does not fit the rest, or the device is not available.
    """

    methods: Sequence[str]
    data: Path
    out: Path
    common: Common
    seeds: Sequence[int] = (0,)
    studies: Sequence[str] = ()
    unseen: Path | None = None
    place: Place = Place()
    command: str = ""
    outside: Sequence[str] = ()
    folds: int = 0

    def __post_init__(self) -> None:
        if not (self.methods or self.studies or self.outside):
            raise InputError(
                "nothing to compare: name methods with --methods a,b,..., studies with --studies, or say --leave-one-out"
            )
        if self.unseen and not any("@when=before" not in method for method in self.methods):
            raise InputError("--unseen measures the networks of --methods that runs end with; name some")
        for option, names, known in (
            ("studies", self.studies, list(STUDIES)),
            ("outside-studies", self.outside, list(OUTSIDE)),
        ):
            if unknown := [name for name in names if name not in known]:
                raise InputError(f"--{option} {','.join(unknown)}: unknown; there are {', '.join(known)}")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise InputError("--seeds: name at least one seed, and each once")
        if self.folds and (self.studies or self.outside or self.unseen):
            raise InputError("--folds compares --methods; give --studies, --unseen and what is outside a command of their own")
        if self.folds < 0 or self.folds == 1:
            raise InputError(f"--folds {self.folds}: at least 2 are needed; the paper's are 5")
        if self.out.exists() and not self.out.is_dir():
            raise InputError(f"--out {self.out} is a file; name a folder")
        if (self.out / RESULTS).exists():
            raise InputError(f"--out {self.out} is the folder of a finished run; name another folder")
        if self.place.env not in ENVIRONMENTS:
            raise InputError(f"--env {self.place.env}: a comparison runs in {' or '.join(ENVIRONMENTS)}")
        # every run would fail on these, one after the other
        dealt(self.place.device, ())
