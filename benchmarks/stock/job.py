"""FLARE's stock FedAvg recipe in FLARE's POC, with FLARE's defaults, in a process of its own (`feddp bench round`)."""

import sys
from pathlib import Path

from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe.poc_env import PocEnv


def main(data: str, out: str, sites: str, rounds: str, size: str, network: str) -> None:
    recipe = FedAvgRecipe(
        # by name: of a module, FLARE copies the class's source and all that it imports, torch too, and then no site takes the
        # app, which may have 4 MiB
        model={"class_path": "feddp.networks.build", "args": {"name": network, "channels": 3, "classes": 1, "seed": 0}},
        min_clients=int(sites),
        num_rounds=int(rounds),
        train_script=str(Path(__file__).with_name("client.py")),
        train_args=f"{data} {out}/times {size} {network}",
    )
    environment = PocEnv(num_clients=int(sites))
    try:
        print(recipe.execute(environment).get_result())
    finally:
        environment.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
