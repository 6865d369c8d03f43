"""FLARE job folders: of a plan (`folder`), and of an adaptation at an unseen site (`adaptation`)."""
