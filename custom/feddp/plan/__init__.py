"""A run as data (`schema`), and what that means (`resolve`)."""
