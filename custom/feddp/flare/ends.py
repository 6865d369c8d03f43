"""At the start of a job, a site and the server say when the certificates end on which the job depends."""

import logging
from pathlib import Path

from nvflare.apis.fl_context import FLContext

from feddp.errors import FedDPError, SealingError
from feddp.flare.audit import audit_if_possible
from feddp.sealing.ends import of_kit, of_server, warnings
from feddp.sealing.kit import Kit
from feddp.sealing.kit_certificates import certificate_problems
from feddp.sealing.reach import reach


def tell_at_site(logger: logging.Logger, fl_ctx: FLContext, folder: Path) -> None:
    """Writes to a site's log when its own, the root's and the server's certificates end; what ends soon, or is wrong, also to
    its audit file.

    Args:
        folder: of the site's kit.
    """
    try:
        kit = Kit.open(folder)
        if problems := certificate_problems(kit):
            raise SealingError(str(problems[0]))
        problem, server = reach(kit)
        seen = of_kit(kit) + ([of_server(server)] if server else [])
        wrong = ([str(problem)] if problem else []) + warnings(seen)
        right = [str(each) for each in seen if not each.soon]
    except FedDPError as error:
        wrong, right = [str(error)], []
    for line in right:
        logger.info(line)
    for line in wrong:
        logger.warning(audit_if_possible(fl_ctx, line))


def at_server(folder: Path) -> list[str]:
    """Returns a line for each certificate of the server's kit that ends soon; none where this process has no kit: in FLARE's
    simulator, and in a container of a job alone."""
    if not (folder / "startup" / "fed_server.json").exists():
        return []
    return warnings(of_kit(Kit.open(folder)))
