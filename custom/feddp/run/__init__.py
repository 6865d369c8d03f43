"""Runs a job on this machine, in one process, FLARE's simulator or POC mode, and collects its results."""
