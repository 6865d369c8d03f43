"""What several test files need: fake sites and servers, stand-ins, measured child processes."""

from pathlib import Path

ROOT = Path(__file__).parents[2]  # of the repository
NEEDS = {"silobn": "resnet18-fpn"}  # {method: a network that has what it needs, where the default network has not}
CAPTURE = Path(__file__).parent / "capture"  # on PYTHONPATH, it makes FLARE's processes write down what they send
