"""Running a job on this machine, in FLARE's simulator or in POC mode, and gathering what it leaves."""
