"""A site's answer that the server cannot read is lost alone; FLARE's server would end the whole job.

It cannot be read if the site is killed while the server downloads its tensors, also of a site that has been started again
since and has answered; or if the site sends what cannot be decoded. FLARE notes the error and tells the sender. A living site
sends its answer again, and one that was started again is given its task again.

A run's end does not wait for an answer that a killed site has left unfinished; FLARE's server process would wait five minutes.
"""

import sys
import threading
from collections import Counter
from functools import wraps
from typing import Any

from nvflare.apis.fl_constant import ServerCommandNames
from nvflare.fuel.f3.cellnet import cell
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.streaming.byte_receiver import RxTask
from nvflare.fuel.f3.streaming.download_service import OBJ_DOWNLOADER_CHANNEL
from nvflare.fuel.f3.streaming.stream_const import StreamHeaderKey
from nvflare.fuel.f3.streaming.stream_types import BlobSizeError, StreamError

_LOST: Counter[str] = Counter()
_ONE = threading.Lock()  # FLARE reads answers in threads


def unread() -> Counter[str]:
    """Returns how many answers of each site this process could not read, by the origin that the server's gate has checked."""
    with _ONE:
        return _LOST.copy()


def outlive_unread_answers() -> None:
    """Makes this process, a server's of a job, go on. A message of the server's that is too large ends it as before."""
    ends, call = cell._is_server_job_cell, cell.Adapter.call
    if hasattr(ends, "__wrapped__"):  # it is done
        return

    @wraps(ends)  # FLARE asks it, while it handles the error, whether to end the process
    def ends_for_size(my_info: Any) -> bool:
        error = sys.exc_info()[1]
        return (error is None or isinstance(error, BlobSizeError)) and ends(my_info)

    @wraps(call)
    def counted(adapter: cell.Adapter, future: Any, *args: Any, **more: Any) -> None:
        try:
            call(adapter, future, *args, **more)
        except Exception:  # of any type: the sender wrote what is decoded here. It goes on to FLARE; here it is counted
            arrived = future.error is None  # as a message, which does not mean that it could be read
            if arrived and future.headers.get(StreamHeaderKey.TOPIC) == ServerCommandNames.SUBMIT_UPDATE:
                with _ONE:
                    _LOST[FQCN.get_root(future.headers[MessageHeaderKey.ORIGIN])] += 1
            raise

    cell._is_server_job_cell, cell.Adapter.call = ends_for_size, counted


def drop_unfinished_answers() -> None:
    """Ends what still arrives of sites' answers and of their tensors; nothing takes it once the run has ended."""
    with RxTask.map_lock:
        arriving = list(RxTask.rx_task_map.values())
    for task in (task for task in arriving if not task.completed):
        if task.topic == ServerCommandNames.SUBMIT_UPDATE or task.channel == OBJ_DOWNLOADER_CHANNEL:
            task.stop(StreamError(f"the run has ended before the answer of {task.origin} was complete"))
