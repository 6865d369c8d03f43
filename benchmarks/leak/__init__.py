"""Parts of the benchmark `inversion`: the attack, and a small network with attention."""
