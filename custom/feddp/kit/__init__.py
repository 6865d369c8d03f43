"""A participant's startup kit, checked before it is started. FLARE's plain kits are not signed: certificates are the anchor."""
