"""Size limits of files of unknown origin, checked before a file is decoded, with the reason of each limit.

Each limit is several times the need of this package's data sets and networks, and small enough that a hostile file causes only
an error message on a site's workstation. If a limit blocks real data, raise it here, for all readers.
"""

MIB = 1024**2

# pictures: the largest of dermatoscopes, fundus cameras and mammographs have 30 million pixels. As three float32 channels of a
# network's input, 36 million pixels take 412 MiB
IMAGE_PIXELS = 6000 * 6000
IMAGE_BYTES = 160 * MIB  # of the file: that many pixels of four bytes, uncompressed, and a header

# volumes: MRI of 512 x 512 x 256; the largest prostate volume has a quarter of that
VOXELS = 512 * 512 * 256
VOLUME_START = 16 * MIB  # bytes before the first voxel, with the header's extensions
VOLUME_TAIL = MIB  # bytes after the last voxel; they are not read

# archives: the public sets have 10 to 40 thousand files
ARCHIVE_FILES = 200_000
ARCHIVE_DIRECTORY = 16 * MIB  # directory of a zip, read whole before the first file: 80 bytes per file
ARCHIVE_RATIO = 1100  # deflate reaches at most 1032 : 1; a higher ratio means a false size or overlapping files
ARCHIVE_BYTES = 256 * 1024 * MIB  # all files together, unpacked

# descriptions
JSON_BYTES = MIB  # dataset.json, metadata of a network's file; parsed, they may take thirty times that memory
JSON_DEPTH = 32  # our files have six levels
RESULTS_BYTES = 32 * MIB  # results.json: the means of 100 sites with 100 networks each are 4 MiB
TABLE_BYTES = 32 * MIB  # split.csv, or a table that comes with a data set
TABLE_ROWS = 250_000  # as pictures of 96 x 96 pixels in memory: 36 GB
TABLE_LINE = 4096  # characters
FILE_NAME = 255  # bytes: the limit of file systems
NAME = 255  # characters of the name of a patient, a class or a site
CLASSES = 255  # a mask has 8 bits, and 0 is the background

# networks: U-Net++ has 16 million parameters; the largest here, FPN with ResNet-50, has 26 million: 105 MB
NETWORK_BYTES = 1024 * MIB
STORED_BYTES = 64 * 1024 * MIB  # a site's stored peers: 100 of the largest networks, with an optimiser's state
HEADER_SHARE = 1024  # a header may take 1/1024 of these bytes: 1 MiB, or 64 MiB; 500 tensors take 75 KiB
PICKLE_BYTES = 16 * MIB  # names and shapes in a PyTorch file, without the values
CHANNELS = 16
SIZE = 1024  # pixels per side of the network's input, where attention takes 600 MiB per image; the paper uses 384
LAYER_OPTION = 100_000  # the largest option is the number of virtual classes: sites times classes
SITES = 1000
