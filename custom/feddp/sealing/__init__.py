"""What goes from hospital to hospital so that the server, which relays it, can neither read nor change it. No FLARE in it."""
