"""Many runs side by side: the paper's tables and figures (001, IV-C to IV-E) on the user's own data."""
