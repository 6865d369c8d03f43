"""The defaults of a run's options, for the command line, which imports nothing heavier, and for `Options`."""

METHOD = "feddp"
ROUNDS = 20
SIZE = 96  # pixels of a side
