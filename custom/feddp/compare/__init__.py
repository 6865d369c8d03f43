"""Many runs side by side: the tables and figures of (Wang et al., TMI 2024) and of the other papers, on the user's own data."""
