"""`feddp kit`: check a startup kit, approve jobs in it, see what jobs used of its budget, have a certificate renewed."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Check a participant's startup kit; approve jobs in it; renew its certificate.")


@app.command()
def check(
    kit: Annotated[Path, typer.Argument(help="A participant's folder, with startup/ and local/.")],
    offline: Annotated[bool, typer.Option("--offline", help="Do not try to reach the server.")] = False,
    fingerprint: Annotated[
        str | None, typer.Option(help="SHA-256 of the consortium's root certificate, learnt otherwise than with the kit.")
    ] = None,
) -> None:
    """Say everything that is wrong with files, certificate, policy, data and connection, one line each; exit 2 if anything is.
    Otherwise say what the policy lets leave."""
    from feddp.kit.check import check as find_problems
    from feddp.kit.check import unseen
    from feddp.kit.effective import effective

    opened, problems = find_problems(kit, offline, fingerprint)
    for problem in problems:
        typer.echo(problem)
    if problems:
        raise typer.Exit(2)
    typer.echo(f"{kit}: {opened.kind} {opened.name} of project {opened.project} may start{unseen(opened)}")
    for line in effective(opened):
        typer.echo(line)


@app.command()
def approve(
    job: Annotated[Path, typer.Argument(help="The job's folder, as the lead exported it.")],
    kit: Annotated[Path, typer.Argument(help="A hospital's folder, with startup/ and local/.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask; for scripts.")] = False,
) -> None:
    """Say what a job will do at this hospital, and let it run there; exit 2 where the hospital's bounds refuse it."""
    from feddp.kit.approve import Approval

    approval = Approval.of(job, kit)
    for line in approval.words():
        typer.echo(line)
    if approval.problems:
        for problem in approval.problems:
            typer.echo(f"refused: {problem}")
        raise typer.Exit(2)
    if approval.given:
        typer.echo(f"{approval.privacy} takes it already; nothing was written")
        return
    if not yes and not typer.confirm("Let it run here?"):
        typer.echo("not approved; nothing was written")
        raise typer.Exit(1)
    approval.write()
    typer.echo(f"approved in {approval.privacy}, for every submission of this job until you remove the line")


@app.command()
def budget(
    kit: Annotated[Path, typer.Argument(help="A site's folder, with startup/ and local/.")],
    reset: Annotated[bool, typer.Option("--reset", help="Begin anew: nothing is used.")] = False,
) -> None:
    """Say how many jobs and evaluations were asked of the site's data, and how many its policy allows."""
    from feddp.kit.budget import budget as lines_of

    for line in lines_of(kit, reset):
        typer.echo(line)


@app.command()
def renew(
    state: Annotated[Path, typer.Argument(help="FLARE's state/cert.json, in the folder of the provisioned project.")],
    name: Annotated[str, typer.Argument(help="The participant.")],
) -> None:
    """Have the next `nvflare provision` issue a new certificate and key to a participant."""
    from feddp.kit.renew import forget

    forget(state, name)
    typer.echo(f"{name} gets a new certificate with the next nvflare provision")
