"""The names of the metrics (`feddp.training.metrics`), and of the columns in which they stand."""

from collections.abc import Iterable, Sequence

METRICS = ("dice", "iou", "hd", "hd95", "assd", "assd-medpy")
VOLUME_METRICS = ("dice", "iou")  # of a case (`feddp.training.volumes`)
DISTANCES = ("hd", "hd95", "assd", "assd-medpy")
MM, MM_METRICS = "-mm", ("hd95", "assd")  # that are also given in millimetres


def of_class(metric: str, name: str) -> str:
    """Returns the name of a metric of one class; with name "", that of the mean over the classes."""
    return f"{metric}_{name}" if name else metric


def in_mm(metric: str) -> str:
    """Returns the name of a distance in millimetres. These stay at the site: no table of `feddp.protocol` has them."""
    return metric + MM


def columns(metrics: Sequence[str], classes: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of the metrics, means over the classes, and of each class if there are several."""
    return tuple(of_class(metric, name) for name in ("", *(classes if len(classes) > 1 else ())) for metric in metrics)


def class_names(names: Iterable[str]) -> list[str]:
    """Returns the classes that have metrics of their own among the names of `columns`, in their order."""
    return list(dict.fromkeys(name.split("_", 1)[1] for name in names if "_" in name))
