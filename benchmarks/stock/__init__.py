"""FLARE's own recipe, which `feddp bench round` compares with."""
