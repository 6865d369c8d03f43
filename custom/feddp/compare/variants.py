"""The variants that are compared: a method, perhaps with the calibration appended, and its changes: `fedbabu+igc@lambda=0`."""

from dataclasses import dataclass, replace

from feddp.errors import InputError
from feddp.methods import METHODS
from feddp.methods.base import CALIBRATE, HEADS, TUNE
from feddp.run.options import Options

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
    """A method, "igc" if the calibration is appended, and its own `network`, `calibration_epochs` or settings."""

    method: str
    then: str | None = None
    changes: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Variant":
        """`method`, `method+igc`, each with any number of `@key=value`; a `|` in a value is read as a comma.

        Raises:
            InputError: it has no method, or a change is no `key=value`.
        """
        head, *changes = text.strip().split("@")
        method, _, then = head.partition("+")
        pairs = [change.partition("=") for change in changes]
        if not method or any(not (key and equals and value) for key, equals, value in pairs):
            raise InputError(f"{text!r} is no variant; write method, method+igc or method@key=value, e.g. feddp@lambda=0")
        return cls(method, then or None, tuple((key, value.replace("|", ",")) for key, _, value in pairs))

    def __str__(self) -> str:
        return self._named(self.method)

    @property
    def label(self) -> str:
        """What its row in a table is called: the variant, with the method's own label if it has one."""
        return self._named(METHODS[self.method].label or self.method)

    def _named(self, method: str) -> str:
        head = f"{method}+{self.then}" if self.then else method
        return "".join([head, *(f"@{key}={value.replace(',', '|')}" for key, value in self.changes)])

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
