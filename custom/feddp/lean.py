"""For a site's process: MONAI without packages that it takes if they are there, and that no part of it used here needs."""

import sys
import threading

UNUSED = "matplotlib", "scipy.signal", "sklearn"
_ONE = threading.Lock()  # FLARE runs a pushed task beside the fetched one


def import_monai() -> None:
    """Imports MONAI, of which `import` alone loads everything, with `UNUSED` hidden from it.

    So MONAI takes one CPU-second and 83 MiB instead of two and 153 MiB (docs/results/speed.md).
    Afterwards others import these packages as ever. What of MONAI needs them says that they are missing: its plots, the
    metrics of collapsed embeddings, filters of signals and the ultrasound confidence map. Another thread's import of a hidden
    package fails meanwhile. Therefore this is for processes that a run starts for its sites, not for a user's own.
    """
    with _ONE:
        hidden = [name for name in UNUSED if name not in sys.modules]
        # an import of None fails as that of a missing package
        sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
        try:
            import monai  # noqa: F401
        finally:
            for name in hidden:
                del sys.modules[name]
