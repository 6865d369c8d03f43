"""Only the owner can read the files that a participant's processes write."""

import os

from nvflare.apis.fl_component import FLComponent

OTHERS = 0o077  # umask: no rights for the group and all others


class PrivateFiles(FLComponent):
    """For resources.json of the server and of every site: other users cannot read the files that this process creates.

    FLARE builds the components of resources.json before it opens its log and its audit file, in the parent process and in every
    job's process, also in containers, where a start script's umask has no effect. Before that it writes only process numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        os.umask(OTHERS)
