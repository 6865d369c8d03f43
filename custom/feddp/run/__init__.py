"""Runs a job on this machine, without FLARE, in FLARE's simulator or POC mode, and collects its results."""
