"""What a participant's processes write is its own."""

import os

from nvflare.apis.fl_component import FLComponent

OTHERS = 0o077  # what a group and all others get of a file: nothing


class PrivateFiles(FLComponent):
    """For resources.json of the server and of every site: no file that this process makes from here on can be read by others.

    FLARE builds the components of resources.json before it opens its log and its audit file, in the parent's process and again
    in every job's, in containers too, where a start script's umask does not reach. What it wrote before are process numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        os.umask(OTHERS)
