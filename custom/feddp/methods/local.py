"""Local Train: each site alone, no exchange (001, Table I).

Deviations: the sites train in step, so that their curves are comparable; nothing is shared, so nothing flows.
"""

from feddp.methods.base import Method
from feddp.partition import ALL


class Local(Method):
    private = (ALL,)
