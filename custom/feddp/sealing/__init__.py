"""Site-to-site encryption: the server relays sealed envelopes that it can neither read nor change. It does not need FLARE."""
