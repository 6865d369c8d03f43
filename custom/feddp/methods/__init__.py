"""The methods by name: those of this package, and those that other installed packages bring.

Their declarations are read without torch (`feddp methods`): a method's file imports what a hook computes with in the hook.
Adding one: a file beside these and a line in OWN, or a package of its own with an entry point in the group `feddp.methods`,
installed at every participant. A job carries a method's name, never its code.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points

from feddp.errors import InputError
from feddp.methods.apfl import APFL
from feddp.methods.base import Method
from feddp.methods.centralized import Centralized
from feddp.methods.ditto import Ditto
from feddp.methods.fedavg import FedAvg
from feddp.methods.fedbabu import FedBABU
from feddp.methods.fedbn import FedBN
from feddp.methods.feddg import FedDG
from feddp.methods.feddp import FedDP
from feddp.methods.fedgkd import FedGKD
from feddp.methods.fedlc import FedLC
from feddp.methods.fednova import FedNova
from feddp.methods.fedoap import FedOAP
from feddp.methods.fedper import FedPer
from feddp.methods.fedprox import FedProx
from feddp.methods.fedrep import FedRep
from feddp.methods.fedrod import FedRoD
from feddp.methods.finetune import FineTune
from feddp.methods.iop_fl import IOPFL
from feddp.methods.lg_fedavg import LGFedAvg
from feddp.methods.local import Local
from feddp.methods.lora import LoRA
from feddp.methods.moon import MOON
from feddp.methods.pfedme import PFedMe
from feddp.methods.pflfe import FCPFLFE, PFLFE
from feddp.methods.silobn import SiloBN
from feddp.methods.ttt import TTT
from feddp.methods.virtual_class import VirtualClass

GROUP = "feddp.methods"
OWN: dict[str, type[Method]] = {
    "apfl": APFL,
    "centralized": Centralized,
    "ditto": Ditto,
    "fc_pflfe": FCPFLFE,
    "fedavg": FedAvg,
    "fedbabu": FedBABU,
    "fedbn": FedBN,
    "feddg": FedDG,
    "feddp": FedDP,
    "fedgkd": FedGKD,
    "fedlc": FedLC,
    "fednova": FedNova,
    "fedoap": FedOAP,
    "fedper": FedPer,
    "fedprox": FedProx,
    "fedrep": FedRep,
    "fedrod": FedRoD,
    "finetune": FineTune,
    "iop_fl": IOPFL,
    "lg_fedavg": LGFedAvg,
    "local": Local,
    "lora": LoRA,
    "moon": MOON,
    "pfedme": PFedMe,
    "pflfe": PFLFE,
    "silobn": SiloBN,
    "ttt": TTT,
    "virtual_class": VirtualClass,
}


class Methods(Mapping[str, type[Method]]):
    """OWN and the entry points of GROUP. The code of another package is imported when its method is first used."""

    @cached_property
    def _others(self) -> dict[str, EntryPoint]:
        found: dict[str, EntryPoint] = {}
        for point in entry_points(group=GROUP):
            if point.name in OWN or found.get(point.name, point) != point:
                raise InputError(f"there are two methods {point.name!r}, one of {point.value}; uninstall one of them")
            found[point.name] = point
        return found

    def __getitem__(self, name: str) -> type[Method]:
        if name in OWN:
            return OWN[name]
        point = self._others[name]
        try:
            method = point.load()
        except Exception as error:  # the import of another package may raise any error
            raise InputError(
                f"the method {name!r} of {point.value} cannot be loaded: {error}; reinstall its package"
            ) from error
        if not (isinstance(method, type) and issubclass(method, Method)):
            raise InputError(f"the method {name!r} of {point.value} is not a feddp.methods.base.Method; correct its package")
        return method

    def __iter__(self) -> Iterator[str]:
        yield from OWN
        yield from sorted(self._others)

    def __len__(self) -> int:
        return len(OWN) + len(self._others)


METHODS = Methods()
