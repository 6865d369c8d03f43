"""`feddp watch`."""

from pathlib import Path
from typing import Annotated

import typer

from feddp.errors import InputError
from feddp.terminal import say


def watch(
    run: Annotated[str, typer.Argument(help="A run's folder (--out) here; with --kit, a job's id or its begin.")] = "",
    kit: Annotated[Path | None, typer.Option(help="A person's kit: watch a job of a consortium; default: its one job.")] = None,
) -> None:
    """Show a run until it ends: rounds, time left, what each site does, losses, Dice, bytes. Exit code 0: it has results."""
    from feddp.run.watch import FolderRun
    from feddp.run.watch import watch as follow

    if kit is not None:
        from feddp.run.watch_job import certificates, job_of, opened
        from feddp.sealing.kit import Kit

        person = Kit.open(kit)
        for line in certificates(person):
            say(line)
        with opened(person) as session:
            follow(job_of(session, run))
        return
    if not run:
        raise InputError("name a run's folder, or the kit of a person with --kit")
    follow(FolderRun(Path(run)))
