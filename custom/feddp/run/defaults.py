"""What a run is where its user does not say: for the command line, which reads nothing heavier, and for `Options`."""

METHOD = "feddp"
ROUNDS = 20
SIZE = 96  # pixels of a side
