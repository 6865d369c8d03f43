"""Checks a participant's startup kit before its start. FLARE's plain kits are unsigned; their certificates are the anchor."""
