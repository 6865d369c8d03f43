"""An unseen site: a finished run's models, the site's images, and no labels (IOP-FL; Jiang et al., section III-C)."""
