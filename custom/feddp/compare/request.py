"""What a comparison is asked for."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from feddp.compare.outside_studies import OUTSIDE
from feddp.compare.studies import STUDIES
from feddp.compare.variants import Common
from feddp.errors import InputError
from feddp.training.device import asked_for


@dataclass(frozen=True)
class Request:
    """What to compare.

    Args:
        methods: variants, as `Variant.parse` reads them.
        studies: names in STUDIES.
        unseen: a site's folder outside the federation, for `methods`.
        command: the command line, for the record.
        outside: names in OUTSIDE, with every site in turn outside the federation.
        folds: into how many parts each site's patients are dealt, each part the test split once; 0: the sites' own split.

    Raises:
        InputError: nothing is asked for, something unknown, what does not go together, or a device that is not there.
    """

    methods: Sequence[str]
    data: Path
    out: Path
    common: Common
    seeds: Sequence[int] = (0,)
    studies: Sequence[str] = ()
    unseen: Path | None = None
    device: str = "cpu"
    threads: int | None = None
    command: str = ""
    outside: Sequence[str] = ()
    folds: int = 0

    def __post_init__(self):
        if not (self.methods or self.studies or self.outside):
            raise InputError(
                "nothing to compare: name methods with --methods a,b,..., studies with --studies, or say --leave-one-out"
            )
        if self.unseen and not self.methods:
            raise InputError("--unseen measures the networks of --methods; name some")
        for option, names, known in (("studies", self.studies, STUDIES), ("outside-studies", self.outside, OUTSIDE)):
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
        # every run would fail on it, one after the other
        asked_for(self.device)
