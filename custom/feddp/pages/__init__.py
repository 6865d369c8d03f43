"""HTML pages of finished runs: one of means for whoever may see results, one of patients' images for a site alone."""
