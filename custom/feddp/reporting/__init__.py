"""How results are shown: tables, plots, and the page of a run."""
