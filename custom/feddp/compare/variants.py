"""The variants that are compared: a method, perhaps with the calibration appended, and its changes: `fedbabu+igc@lambda=0`.

`feddp@when=before` is the same run as `feddp`, measured before its last local stage: FedDP's local query without calibration.
"""

from dataclasses import dataclass, replace

from feddp.compare.scores import BEFORE, FINAL
from feddp.errors import InputError
from feddp.methods import METHODS
from feddp.methods.base import CALIBRATE, HEADS, TUNE
from feddp.run.options import Options

WHEN = "when"  # before or after the last local stage; no change of the run
_WITH_EPOCHS = {HEADS, CALIBRATE}  # the stages whose epochs are Options' calibration_epochs


@dataclass(frozen=True)
class Common:
    """What all runs of a comparison share, as `feddp run` means it; `settings` as `key=value`."""

    rounds: int
    calibration_epochs: int | None
    network: str
    size: int
    settings: tuple[str, ...] = ()
    weights: str | None = None


@dataclass(frozen=True)
class Variant:
    """A method, "igc" if the calibration is appended, and its own `network`, `calibration_epochs` or settings.

    `when` is BEFORE or FINAL: whether the networks before or after the last local stage are measured.
    """

    method: str
    then: str | None = None
    changes: tuple[tuple[str, str], ...] = ()
    when: str = FINAL

    @classmethod
    def parse(cls, text: str) -> "Variant":
        """`method`, `method+igc`, each with any number of `@key=value`; a `|` in a value is read as a comma.

        Raises:
            InputError: it has no method, a change is no `key=value`, or `when` is neither before nor final.
        """
        head, *changes = text.strip().split("@")
        method, _, then = head.partition("+")
        pairs = [change.partition("=") for change in changes]
        if not method or any(not (key and equals and value) for key, equals, value in pairs):
            raise InputError(f"{text!r} is no variant; write method, method+igc or method@key=value, e.g. feddp@lambda=0")
        given = [(key, value.replace("|", ",")) for key, _, value in pairs]
        when = dict(given).get(WHEN, FINAL)
        if when not in (BEFORE, FINAL):
            raise InputError(f"{text}: {WHEN}={when} is neither {BEFORE} nor {FINAL}, the last local stage; correct it")
        return cls(method, then or None, tuple((key, value) for key, value in given if key != WHEN), when)

    def __str__(self) -> str:
        return self._named(self.method)

    @property
    def label(self) -> str:
        """What its row in a table is called: the variant, with the method's own label if it has one."""
        return self._named(METHODS[self.method].label or self.method)

    def _named(self, method: str) -> str:
        head = f"{method}+{self.then}" if self.then else method
        changes = self.changes if self.when == FINAL else (*self.changes, (WHEN, self.when))
        return "".join([head, *(f"@{key}={value.replace(',', '|')}" for key, value in changes)])

    def options(self, common: Common, seed: int) -> Options:
        """The options of one run: the variant's own changes, then `common`'s settings, then its epochs where they fit.

        `common.calibration_epochs` goes to the stages after training that a method has; a method without one would refuse it.

        Raises:
            InputError: a setting of `common` is no `key=value`, or the variant's calibration_epochs no whole number.
        """
        settings: dict[str, str] = {}
        for text in common.settings:
            key, equals, value = text.partition("=")
            if not equals:
                raise InputError(f"--set {text}: write key=value")
            settings[key] = value
        own = dict(self.changes)
        network, epochs = own.pop("network", common.network), own.pop("calibration_epochs", None)
        stages = {*(METHODS[self.method].stages if self.method in METHODS else ()), *([CALIBRATE] if self.then else [])}
        calibration_epochs = None
        if epochs is not None:
            calibration_epochs = self._whole("calibration_epochs", epochs)
            settings.pop("calibration_epochs", None)
        elif stages & _WITH_EPOCHS and "calibration_epochs" not in settings:
            calibration_epochs = common.calibration_epochs
        settings |= own
        if TUNE in stages and common.calibration_epochs is not None:
            settings.setdefault("tune_epochs", str(common.calibration_epochs))
        pairs = tuple(f"{key}={value}" for key, value in settings.items())
        return Options(
            self.method, common.rounds, calibration_epochs, network, common.size, seed, pairs, self.then, common.weights
        )

    def without(self, key: str) -> "Variant":
        return replace(self, changes=tuple(change for change in self.changes if change[0] != key))

    def _whole(self, key: str, value: str) -> int:
        try:
            return int(value)
        except ValueError:
            raise InputError(f"{self}: {key}={value!r} is not a whole number; correct the value") from None
