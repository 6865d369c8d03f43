"""FedDP on NVIDIA FLARE: personalized federated segmentation."""

from feddp.lean import postpone_compiler

postpone_compiler()
