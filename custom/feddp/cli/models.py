"""`feddp models list`, `deploy` and `rollback`."""

from pathlib import Path
from typing import Annotated

import typer

from feddp.terminal import say

app = typer.Typer(no_args_is_help=True, help="The networks that this site has deployed.")

RegistryFolder = Annotated[
    Path, typer.Option("--registry", envvar="FEDDP_MODELS", help="The folder of the deployed networks; or FEDDP_MODELS.")
]
HERE = Path("models")


@app.command("list")
def list_models(registry: RegistryFolder = HERE) -> None:
    """List deployments and rollbacks; a star marks the deployed network. Exit code 2 if its file has changed."""
    from feddp.run.registry import Registry

    found = Registry(registry)
    lines = list(found.lines())
    for line in lines or [f"no network is deployed in {registry}"]:
        say(line)
    if lines:
        found.deployed()


@app.command()
def deploy(
    network: Annotated[Path, typer.Argument(help="A network that a run left; it is copied.")],
    registry: RegistryFolder = HERE,
) -> None:
    """Deploy a network: from now on `feddp predict --deployed` uses it."""
    from feddp.run.registry import Registry

    say(Registry(registry).deploy(network))


@app.command()
def rollback(registry: RegistryFolder = HERE) -> None:
    """Go back to the network that was deployed before the present one."""
    from feddp.run.registry import Registry

    say(Registry(registry).rollback())
