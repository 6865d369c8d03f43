"""`feddp runs list`, `feddp runs slim` and `feddp runs delete`."""

from pathlib import Path
from typing import Annotated

import typer

from feddp.terminal import say

app = typer.Typer(no_args_is_help=True, help="List, slim and delete the runs of this machine.")


@app.command("list")
def list_runs(folder: Annotated[Path, typer.Argument(help="The folder with the runs.")] = Path("runs")) -> None:
    """List the runs below FOLDER: method, place, rounds, state, size, begin; and what continues a broken-off one.
    The damaged ones come last, with the reason; exit code 2 if there is any."""
    from feddp.run.folders import listed

    found, damaged = listed(folder)
    for line in (*found, *damaged):
        say(line)
    if damaged:
        raise typer.Exit(2)
    if not found:
        say(f"no run below {folder}")


@app.command()
def slim(
    folder: Annotated[Path, typer.Argument(help="The --out folder of a run or of a comparison.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask; for scripts.")] = False,
) -> None:
    """Remove from the finished runs in FOLDER what tables are not made from: networks, TensorBoard's files, FLARE's metrics,
    copies of the job, the environment's folders, the run's own page. `feddp compare` takes such runs as finished. Unfinished
    and running ones stay as they are."""
    from rich.filesize import decimal

    from feddp.reading import counted
    from feddp.run.folders import lines, to_slim

    whole, others = to_slim(folder)
    for line in lines(whole):
        say(line)
    for run in others:
        say(f"stays as it is, because it is not finished or in use: {run.path}")
    if not whole:
        say("nothing was removed")
        return
    question = "Remove their networks, TensorBoard's files and copies of the job? Only training makes them again."
    if not yes and not typer.confirm(question):
        say("nothing was removed")
        raise typer.Exit(1)
    freed = sum(run.slim() for run in whole)
    left = sum(run.size() for run in whole)
    say(f"freed {decimal(freed)} in {counted(len(whole), 'run')}; {decimal(left)} are left")


@app.command()
def delete(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished or broken-off runs.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask; for scripts.")] = False,
) -> None:
    """Delete runs with their results and networks; a run that is running is refused, and then none is deleted."""
    from feddp.run.folders import RunFolder, lines

    found = [RunFolder.of(path) for path in dict.fromkeys(runs)]
    for run in found:
        run.require_idle()
    for line in lines(found):
        say(line)
    if not yes and not typer.confirm("Delete them, with all results and networks?"):
        say("nothing was deleted")
        raise typer.Exit(1)
    for run in found:
        run.delete()
        say(f"deleted {run.path}")
