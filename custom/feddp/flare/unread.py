"""A site's answer that the server cannot read is lost alone; FLARE's server would end the whole job.

It cannot be read if the site is killed while the server downloads its tensors, also of a site that has been started again
since and has answered; or if the site sends what cannot be decoded. FLARE notes the error and tells the sender. A living site
sends its answer again, and one that was started again is given its task again.
"""

import sys
from functools import wraps
from typing import Any

from nvflare.fuel.f3.cellnet import cell
from nvflare.fuel.f3.streaming.stream_types import BlobSizeError


def outlive_unread_answers() -> None:
    """Makes this process, a server's of a job, go on. A message of the server's that is too large ends it as before."""
    ends = cell._is_server_job_cell  # FLARE asks it, while it handles the error, whether to end the process
    if hasattr(ends, "__wrapped__"):  # it is done
        return

    @wraps(ends)
    def ends_for_size(my_info: Any) -> bool:
        error = sys.exc_info()[1]
        return (error is None or isinstance(error, BlobSizeError)) and ends(my_info)

    cell._is_server_job_cell = ends_for_size
