"""The FedAvg that a method is compared with: one network of the same choice of round.

A method with a local stage goes on from the last round; others end with the round that is best on the validation images. Which
round is taken may move FedAvg itself as much as methods differ, so FedAvg has two rows where both kinds are compared.
"""

from collections.abc import Collection

REFERENCE = "fedavg"
LAST = ("fedavg@start=last", "finetune@when=before")  # FedAvg's last round; the second needs no run beside finetune's


def last_round(found: Collection[str], last: Collection[str]) -> str | None:
    """The compared row of FedAvg's last round; None without one. Arguments as of `reference`."""
    return next((name for name in LAST if name in found and name in last), None)


def reference(label: str, found: Collection[str], last: Collection[str]) -> str:
    """The method that `label` is compared with: FedAvg of its choice of round, else FedAvg, else the first.

    Without FedAvg's best round all methods have one reference.

    Args:
        found: the compared methods, in order.
        last: those whose networks are of the last round, or went on from it.
    """
    end = last_round(found, last)
    if REFERENCE not in found:
        return end or next(iter(found))
    return end if end and label in last and label not in LAST and REFERENCE not in last else REFERENCE


def unlike(found: Collection[str], last: Collection[str]) -> list[str]:
    """The methods that are compared with a network of the other choice of round, because there is none of their own.

    Not FedAvg's own rows, between which the choice of the round is what is compared.
    """
    return [label for label in found if label not in LAST and (label in last) != (reference(label, found, last) in last)]
