"""The FedAvg that a method is compared with: one network of the same choice of round.

A method with a local stage goes on from the last round, others end with the round that is best on the validation images. Which
round is taken moves FedAvg itself, by as much as methods differ, so that the two kinds need two rows of FedAvg.
"""

from collections.abc import Collection

REFERENCE = "fedavg"
LAST = ("fedavg@start=last", "finetune@when=before")  # FedAvg's last round; the second needs no run of its own


def reference(label: str, found: Collection[str], last: Collection[str]) -> str:
    """The method that `label` is compared with: FedAvg of its choice of round, else FedAvg, else the first.

    Args:
        found: the compared methods, in order.
        last: those whose networks are of the last round, or went on from it.
    """
    if label in last and label not in LAST and REFERENCE not in last:
        for name in LAST:
            if name in found and name in last:
                return name
    return REFERENCE if REFERENCE in found else next(iter(found))


def unlike(found: Collection[str], last: Collection[str]) -> list[str]:
    """The methods of the last round that are compared with FedAvg's best, because FedAvg's last has no row."""
    if REFERENCE not in found or REFERENCE in last:
        return []
    return [label for label in found if label in last and label not in LAST and reference(label, found, last) == REFERENCE]
