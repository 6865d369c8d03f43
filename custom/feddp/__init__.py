"""FedDP on NVIDIA FLARE: personalized federated segmentation."""
