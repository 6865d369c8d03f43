"""Adaptation of a finished run's models to an unseen site's images, without labels (IOP-FL; Jiang et al., TMI 2023, III-C)."""
