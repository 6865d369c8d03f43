"""Imports less: torch's compiler when something compiles, and its kernels for tensors without values when something computes
with these; MONAI without packages that it takes if they are there. And a command, or a process of a run, ends without a look
through all that it has imported."""

import atexit
import gc
import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, wraps
from importlib.machinery import PathFinder
from importlib.util import find_spec
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

COMPILER, ITS_UTILS = "torch._dynamo", "torch._dynamo.utils"
META = "torch._meta_registrations"  # those kernels of the meta device that are written in Python
# FLARE's modules of the process that runs a kit, and of a job's process: a site's and the server's
PARENTS = ("nvflare.private.fed.app.client.client_train", "nvflare.private.fed.app.server.server_train")
JOBS = ("nvflare.private.fed.app.client.worker_process", "nvflare.private.fed.app.server.runner_process")
# those and others that run as a process of a run, by FLARE's simulator or by `--env local --threads N`
PROCESSES = {
    *JOBS,
    "feddp.run.patient_simulator",
    "feddp.run.worker",
    "nvflare.private.fed.app.simulator.simulator_worker",
}
UNUSED = "matplotlib", "scipy.signal", "sklearn"
_ONE = threading.Lock()  # FLARE runs a pushed task beside the fetched one
_LEAVE = threading.Lock()


class Later(ModuleType):
    """Stands for a module until something is asked of it that it does not have; then it makes way, and `others` with it.

    Args:
        others: modules that are imported with it, before it.
    """

    def __init__(self, name: str, others: tuple[str, ...] = ()):
        super().__init__(name)
        self.all = (*others, name)

    def __getattr__(self, name: str) -> Any:
        # the import system and inspect ask every module for such names; for this one, a module within the package is imported
        if name.startswith("__") and (self.__name__, name) != (COMPILER, "__path__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} yet")
        return getattr(self.loaded(), name)

    def loaded(self) -> ModuleType:
        """Returns the module itself, imported now if it was not."""
        with _LEAVE:
            for module in self.all:
                if isinstance(sys.modules.get(module), Later):
                    del sys.modules[module]
        return [importlib.import_module(module) for module in self.all][-1]

    @property
    def waits(self) -> bool:
        return sys.modules.get(self.__name__) is self


def postpone_compiler() -> None:
    """Has torch's compiler imported when something asks for it to compile, and not by whatever mentions it; and what computes
    with tensors that have no values, by the compiler, or by `meta_device`. For the latter nothing may have imported torch yet.

    torchvision asks its utils for one function, and every optimizer asks it to leave some functions alone, and for breaks in
    the compiled code around a step. Without anything compiled these do nothing. The compiler takes more than one CPU-second
    and 140 MiB of each process, and the other kernels, with sympy, another and 53 MiB (docs/results/speed.md). Whoever asks for
    more gets it; but a module within the compiler that is asked for first is then there twice, and settings of the one are not
    those of the other; and an operation on the meta device may have no kernel. Therefore this is for processes of runs and of
    commands, in which nothing compiles, not for a user's own program.
    """
    if COMPILER in sys.modules or (package := find_spec("torch")) is None:
        return
    if "torch" not in sys.modules:
        sys.modules[META] = Later(META)
    compiler = Later(COMPILER, (META, ITS_UTILS))
    utils = Later(ITS_UTILS, (META, COMPILER))
    compiler.__spec__ = PathFinder.find_spec(COMPILER, package.submodule_search_locations)

    def disable(*given: Any, **how: Any) -> Any:
        if not compiler.waits or not given or not isinstance(given[0], FunctionType):
            return compiler.loaded().disable(*given, **how)
        disabled = cache(lambda: compiler.loaded().disable(*given, **how))

        @wraps(given[0])
        def called(*args: Any, **kwargs: Any) -> Any:
            return (given[0] if compiler.waits else disabled())(*args, **kwargs)

        return called

    def graph_break(*args: Any, **kwargs: Any) -> None:
        """Outside compiled code a break is nothing."""
        if not compiler.waits:
            compiler.loaded().graph_break(*args, **kwargs)

    def is_compile_supported(*args: Any, **kwargs: Any) -> Any:
        return utils.loaded().is_compile_supported(*args, **kwargs)

    vars(compiler).update(disable=disable, graph_break=graph_break)
    vars(utils).update(is_compile_supported=is_compile_supported)
    sys.modules.update({COMPILER: compiler, ITS_UTILS: utils})


def meta_device() -> "torch.device":
    """Returns torch's device without memory, on which tensors have no values, with all its kernels."""
    kernels = importlib.import_module(META)
    if isinstance(kernels, Later):
        kernels.loaded()
    import torch

    return torch.device("meta")


@contextmanager
def no_search() -> Iterator[None]:
    """Keeps Python from its search for what refers to itself, in all threads, while a package is imported: it would go through
    half a million new objects hundreds of times, to free some thousand small ones (docs/results/speed.md)."""
    searches = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if searches:
            gc.enable()


def import_monai() -> None:
    """Imports MONAI, of which `import` alone loads everything, with `UNUSED` hidden from it, and not torch's compiler.

    So MONAI takes one CPU-second and 83 MiB instead of two and 153 MiB (docs/results/speed.md).
    Afterwards others import these packages as ever. What of MONAI needs them says that they are missing: its plots, the
    metrics of collapsed embeddings, filters of signals and the ultrasound confidence map. Another thread's import of a hidden
    package fails meanwhile. Later searches for what refers to itself leave out what is there by now, and ten thousand
    small objects of the import that nothing uses any more stay. Therefore this is for processes that a run starts for its
    sites, not for a user's own. A second call, or one after MONAI's import, does nothing.
    """
    with _ONE:
        if "monai" in sys.modules:
            return
        postpone_compiler()
        hidden = [name for name in UNUSED if name not in sys.modules]
        # an import of None fails as that of a missing package
        sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
        try:
            with no_search():
                import monai  # noqa: F401

                gc.freeze()
        finally:
            for name in hidden:
                del sys.modules[name]


def end_at_once() -> None:
    """Has the process end without a search for what refers to itself, among the million objects of torch and MONAI: the system
    takes everything back. The search takes up to two CPU-seconds (docs/results/speed.md). A file that is open to write and
    is kept by what refers to itself loses what was not written to it yet."""
    atexit.register(_keep)


def _keep() -> None:
    if "triton" not in sys.modules:  # it would call this a leak, in lines on stderr
        gc.freeze()
