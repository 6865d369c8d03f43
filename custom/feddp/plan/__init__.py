"""The plan of a run: its data (`schema`), and the networks and tensors that follow from it (`resolve`)."""
