"""`feddp runs list` and `feddp runs delete`."""

from pathlib import Path
from typing import Annotated

import typer

from feddp.reading import plain

app = typer.Typer(no_args_is_help=True, help="List and delete the runs of this machine.")


@app.command("list")
def list_runs(folder: Annotated[Path, typer.Argument(help="The folder with the runs.")] = Path("runs")) -> None:
    """List the runs below FOLDER: method, place, rounds, state, size, begin; and what continues a broken-off one.
    The damaged ones come last, with the reason; exit code 2 if there is any."""
    from feddp.run.folders import lines, runs_below

    found, damaged = runs_below(folder)
    for line in (*lines(found), *damaged):
        typer.echo(plain(line))
    if damaged:
        raise typer.Exit(2)
    if not found:
        typer.echo(f"no run below {folder}")


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
        typer.echo(plain(line))
    if not yes and not typer.confirm("Delete them, with all results and networks?"):
        typer.echo("nothing was deleted")
        raise typer.Exit(1)
    for run in found:
        run.delete()
        typer.echo(f"deleted {run.path}")
