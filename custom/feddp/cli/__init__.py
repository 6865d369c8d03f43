"""FedDP on NVIDIA FLARE: personalized federated segmentation."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from feddp.cli import adapt, bench, compare, data, export, features, kit, models, report, run, runs, threshold, watch
from feddp.errors import FedDPError, InputError, is_of_user, written_down
from feddp.lean import end_at_once, postpone_compiler
from feddp.reading import plain_line
from feddp.terminal import guard_streams, note, note_uncaught

_UsageError: Any = typer.BadParameter.__base__  # click's or, in later versions, typer's own


class Commands(TyperGroup):
    """The commands. What typer says of a word that is none is plain: a shell makes words of the names of files."""

    def make_context(self, *words: Any, **more: Any) -> Any:
        with _plain_mistakes():
            return super().make_context(*words, **more)

    def invoke(self, ctx: Any) -> Any:
        with _plain_mistakes():
            return super().invoke(ctx)


@contextmanager
def _plain_mistakes() -> Iterator[None]:
    try:
        yield
    except _UsageError as error:
        error.message = plain_line(error.message)
        raise


# help and completion load this package only: a command imports what it runs in its body (tests/integration/test_cli_opens.py)
app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
app.add_typer(data.app, name="data")
app.add_typer(kit.app, name="kit")
app.add_typer(runs.app, name="runs")
app.add_typer(models.app, name="models")
app.command()(compare.compare)
app.command()(adapt.adapt)
app.command()(features.features)
app.command()(adapt.job_outside)
app.command()(adapt.join)
app.command()(run.run)
app.command()(watch.watch)
app.command()(run.job)
app.command()(run.predict)
app.command()(export.export)
app.command()(threshold.calibrate_threshold)
app.command()(report.report)
app.command()(run.methods)
# what follows the benchmark's name is for the benchmark, --help too
app.command(context_settings={"allow_extra_args": True, "allow_interspersed_args": False})(bench.bench)


def main() -> None:
    """The command; a user's mistake ends in one line and exit code 2. What it writes is for its user alone."""
    os.umask(0o077)
    postpone_compiler()
    end_at_once()
    guard_streams()
    try:
        _run()
    except (FedDPError, OSError) as error:
        variables = [value for name, value in os.environ.items() if name.startswith("FEDDP_")]  # paths, such as FEDDP_MODELS
        mistake = isinstance(error, FedDPError) or is_of_user(error, [*sys.argv[1:], *variables])
        bug = "" if mistake else f" ({type(error).__name__}): this is a bug; please report it with {written_down(error)}"
        note(f"feddp: {error}{bug}")
        sys.exit(2 if mistake else 1)
    except Exception:  # of any kind, a bug of ours: it goes on, and its traceback is written as text that no terminal obeys
        sys.excepthook = note_uncaught  # in the place of typer's, which `app` has set
        raise


def _run() -> None:
    """Runs the command; one that lacks memory asks for too much, which is a user's mistake too, as is another FLARE."""
    try:
        app()
    except (ImportError, AttributeError, KeyError, TypeError) as error:  # what another FLARE lacks
        from feddp.kit.installed import other_flare

        if wrong := other_flare():
            raise InputError(wrong) from error
        raise
    except (RuntimeError, MemoryError):
        from feddp.training.device import memory  # no command that works imports torch for this

        lower = "end other programs there, or lower --batch, --size or --network, if the command has one of them"
        with memory("the", lower, "use --device cpu"):
            raise
