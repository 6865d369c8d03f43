"""How large a file that somebody else made may be before anything of it is decoded, and why.

Each limit is several times what the data sets and networks of this package need, and small enough that a hostile file ends in
one line on a hospital's workstation. A limit that is in the way of real data is raised here, for all readers.
"""

MIB = 1024**2

# pictures: of dermatoscopes, fundus cameras and mammographs the largest have 30 million pixels. On the way to a network's
# input, three channels of float32, 36 million take 412 MiB
IMAGE_PIXELS = 6000 * 6000
IMAGE_BYTES = 160 * MIB  # of the file: as many pixels of four bytes, without compression, and a header

# volumes: MRI of 512 x 512 x 256; the largest prostate volume has a quarter of that
VOXELS = 512 * 512 * 256
VOLUME_START = 16 * MIB  # bytes before the first voxel, where a header's extensions are
VOLUME_TAIL = MIB  # bytes after the last voxel, which nobody reads

# archives: the public sets have 10 to 40 thousand files
ARCHIVE_FILES = 200_000
ARCHIVE_DIRECTORY = 16 * MIB  # of a zip, read whole before the first file: 80 bytes a file
ARCHIVE_RATIO = 1100  # deflate cannot do better than 1032 : 1; beyond that a size is a lie, or files overlap
ARCHIVE_BYTES = 256 * 1024 * MIB  # unpacked, all together

# descriptions
JSON_BYTES = MIB  # dataset.json, the metadata of a network's file; parsed, it may take thirty times that
JSON_DEPTH = 32  # ours have six levels
RESULTS_BYTES = 32 * MIB  # results.json: 100 sites' means by every other's network are 4 MiB
TABLE_BYTES = 32 * MIB  # split.csv, or a data set's own table
TABLE_ROWS = 250_000  # as pictures of 96 x 96 pixels in memory, 36 GB
TABLE_LINE = 4096  # characters
FILE_NAME = 255  # bytes: what file systems take
NAME = 255  # characters of a patient, a class, a site
CLASSES = 255  # a mask has 8 bits, and 0 is the background

# networks: the largest here, U-Net++, has 16 million parameters, ResNet-50's FPN 26: 105 MB
NETWORK_BYTES = 1024 * MIB
STORED_BYTES = 64 * 1024 * MIB  # what a site keeps of its peers: 100 of the largest networks, with an optimiser's state
HEADER_SHARE = 1024  # a header may be this part of these bytes: 1 MiB, or 64; 500 tensors take 75 KiB
PICKLE_BYTES = 16 * MIB  # of a PyTorch file: names and shapes, not the values
CHANNELS = 16
SIZE = 1024  # pixels of a side of the network's input, where attention takes 600 MiB an image; the paper's are 384
LAYER_OPTION = 100_000  # the largest is the number of virtual classes, sites times classes
SITES = 1000
