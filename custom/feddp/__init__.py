"""FedDP on NVIDIA FLARE: personalized federated segmentation."""

import sys

from feddp.lean import PROCESSES, end_at_once, postpone_compiler

if not PROCESSES.isdisjoint(sys.orig_argv):
    postpone_compiler()  # before anything imports torch
    end_at_once()  # FLARE has closed its files by then
