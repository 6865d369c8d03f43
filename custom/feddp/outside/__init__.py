"""A hospital outside the federation: the finished models, its images, and no labels (IOP-FL, 004, section III-C)."""
