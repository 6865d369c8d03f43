"""The one exception a user is meant to read."""


class FedDPError(Exception):
    """Bad input: a folder, a mask, a config, a contribution, a certificate.

    The message names the file or the site and the remedy; the command line prints it without a traceback and
    exits with 2.
    """


class Stopped(FedDPError):
    """The job was aborted while this was at work: nobody's mistake, so nothing to report."""
