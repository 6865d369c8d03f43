"""`feddp kit`: check a startup kit before it is started, and have a certificate renewed."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Check a participant's startup kit; renew its certificate.")


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
def renew(
    state: Annotated[Path, typer.Argument(help="FLARE's state/cert.json, in the folder of the provisioned project.")],
    name: Annotated[str, typer.Argument(help="The participant.")],
) -> None:
    """Have the next `nvflare provision` issue a new certificate and key to a participant."""
    from feddp.kit.renew import forget

    forget(state, name)
    typer.echo(f"{name} gets a new certificate with the next nvflare provision")
