"""Methods of several stages or phases, one thread for two sites: the plain loop's bits, though no process remembers.

A file of its own, so that it runs beside test_methods_in_flare.
"""

import pytest
from in_flare import SEVERAL, check_same_bits


@pytest.mark.parametrize("method", SEVERAL)
def test_a_new_process_for_every_task_comes_to_the_same_bits(tiny_root, plan_for, tmp_path, method):
    check_same_bits(method, tiny_root, plan_for, tmp_path, threads=1)
