"""`feddp kit`: check and start a startup kit, approve jobs in it, show the budget that jobs used, renew a certificate."""

from pathlib import Path
from typing import Annotated

import typer

from feddp.cli.options import given
from feddp.errors import InputError
from feddp.kit.installed import require_flare
from feddp.terminal import say

app = typer.Typer(
    no_args_is_help=True, help="Check and start a participant's startup kit; approve jobs in it; renew its certificate."
)


@app.command()
def check(
    context: typer.Context,
    kit: Annotated[Path, typer.Argument(help="A participant's folder, with startup/ and local/.")],
    offline: Annotated[bool, typer.Option("--offline", help="Do not try to reach the server.")] = False,
    fingerprint: Annotated[
        str | None, typer.Option(help="SHA-256 of the consortium's root certificate, received by another way than the kit.")
    ] = None,
    canary: Annotated[
        Path | None, typer.Option(help="A job's folder: with the kit of a person, run its first two rounds and time the links.")
    ] = None,
    within: Annotated[float, typer.Option(min=1, help="Seconds from the canary's submission until it is aborted.")] = 1800,
) -> None:
    """Print every problem of files, certificate, policy, data and connection, one per line; exit code 2 if there is any.
    Otherwise print what the policy allows to leave. With --canary, submit a job, end it after two rounds, and print bytes and
    seconds of every site's messages."""
    if canary is None and "--within" in given(context):
        raise InputError("--within is for --canary; name a job's folder, or leave it out")
    if canary is not None and offline:
        raise InputError("--canary submits a job to the server; leave out --offline")
    require_flare()
    from feddp.kit.check import check as find_problems
    from feddp.kit.check import notes, unseen
    from feddp.kit.effective import effective

    checked = find_problems(kit, offline, fingerprint)
    for problem in checked.problems:
        say(problem)
    if checked.problems:
        raise typer.Exit(2)
    opened = checked.kit
    say(f"{kit}: {opened.kind} {opened.name} of project {opened.project} may start{unseen(opened)}")
    for line in (*notes(checked), *effective(opened)):
        say(line)
    if canary is not None:
        from feddp.kit.canary import canary as try_links

        lines, problems_of_links = try_links(opened, canary, within)
        for line in (*lines, *problems_of_links):
            say(line)
        if problems_of_links:
            raise typer.Exit(2)


@app.command()
def start(kit: Annotated[Path, typer.Argument(help="The folder of a site or the server, with startup/ and local/.")]) -> None:
    """Run a site or the server until it is stopped, here or by a command of FLARE; exit code 0 only then. What an earlier
    process left behind, as at a power cut, does not keep it from starting."""
    require_flare()
    from feddp.kit.start import start as run

    if code := run(kit, say):
        raise typer.Exit(code)


@app.command()
def approve(
    job: Annotated[Path, typer.Argument(help="The job's folder, as the lead exported it.")],
    kit: Annotated[Path, typer.Argument(help="A hospital's folder, with startup/ and local/.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask; for scripts.")] = False,
) -> None:
    """Print what a job will do at this hospital, and allow it to run there; exit code 2 if the hospital's bounds refuse it."""
    require_flare()
    from feddp.kit.approve import Approval

    approval = Approval.of(job, kit)
    for line in approval.words():
        say(line)
    if approval.problems:
        for problem in approval.problems:
            say(f"refused: {problem}")
        raise typer.Exit(2)
    if approval.given:
        say(f"{approval.privacy} takes it already; nothing was written")
        return
    if not yes and not typer.confirm("Let it run here?"):
        say("not approved; nothing was written")
        raise typer.Exit(1)
    approval.write()
    say(f"approved in {approval.privacy}, for every submission of this job until you remove the line")


@app.command()
def budget(
    kit: Annotated[Path, typer.Argument(help="A site's folder, with startup/ and local/.")],
    reset: Annotated[bool, typer.Option("--reset", help="Start again with nothing used.")] = False,
) -> None:
    """Print how many jobs and evaluations used the site's data, and how many its policy allows."""
    from feddp.kit.budget import budget as lines_of

    for line in lines_of(kit, reset):
        say(line)


@app.command()
def renew(
    state: Annotated[Path, typer.Argument(help="FLARE's state/cert.json, in the folder of the provisioned project.")],
    name: Annotated[str, typer.Argument(help="The participant.")],
) -> None:
    """Have the next `nvflare provision` issue a new certificate and key to a participant."""
    from feddp.kit.renew import forget

    forget(state, name)
    say(f"{name} gets a new certificate with the next nvflare provision")
