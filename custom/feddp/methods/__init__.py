"""The methods by name. Adding one: a file beside these, and a line here."""

from feddp.methods.base import Method
from feddp.methods.fedavg import FedAvg
from feddp.methods.feddp import FedDP
from feddp.methods.finetune import FineTune
from feddp.methods.local import Local

METHODS: dict[str, type[Method]] = {"local": Local, "fedavg": FedAvg, "finetune": FineTune, "feddp": FedDP}
