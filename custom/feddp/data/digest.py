"""What a site's images and masks show, in one number."""

from hashlib import sha256

import numpy as np

from feddp.data.folder import SiteFolder
from feddp.data.pixels import read_image, read_mask
from feddp.data.progress import track


def pixels_digest(folder: SiteFolder) -> str:
    """Returns the SHA-256 of all pixels, of each image and its mask in the order of split.csv.

    Not of the files: another machine's library may write the same pixels as other bytes.

    Raises:
        BadFile: an image or a mask is missing or not as dataset.json says.
    """
    found = sha256()
    for row in track(folder.rows, f"Reading the images of {folder.site}", len(folder.rows)):
        image = read_image(folder.image_path(row.image), folder.channels, folder.path)
        for each in (image, read_mask(folder.mask_path(row.image), len(folder.classes), folder.path)):
            found.update(f"{each.shape}".encode())
            found.update(np.ascontiguousarray(each).tobytes())
    return found.hexdigest()
