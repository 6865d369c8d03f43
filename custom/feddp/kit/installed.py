"""The FLARE that is installed here. With another one than this package is made for, what it imports may be missing.

Nothing of FLARE is imported here but its version: the rest of `feddp.kit` cannot be imported with just any.
"""

from feddp.errors import InputError

NEEDED = "2.9"  # as in pyproject.toml; FLARE's modules, templates and messages change with its first two numbers


def other_flare() -> str | None:
    """Returns what is wrong with the installed FLARE, with the remedy; None if it is the right one."""
    try:
        from nvflare import __version__ as version
    except ImportError:  # also a folder of that name without a version
        version = "none"
    if str(version).split(".")[:2] == NEEDED.split("."):
        return None
    remedy = f"install this package's own FLARE in its environment: pip install 'nvflare=={NEEDED}.*'"
    return f"FLARE {version} is installed here, but this version of FedDP needs FLARE {NEEDED}; {remedy}"


def require_flare() -> None:
    """Raises InputError if the installed FLARE is another one than this package needs."""
    if wrong := other_flare():
        raise InputError(wrong)
