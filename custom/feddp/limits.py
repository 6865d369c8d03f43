"""Size limits of files of unknown origin, checked before a file is decoded, with the reason of each limit.

Each limit is several times the need of this package's data sets and networks, and small enough that a hostile file causes only
an error message on a site's workstation. If a limit blocks real data, raise it here, for all readers.
"""

MIB = 1024**2

# pictures: the largest of dermatoscopes, fundus cameras and mammographs have 30 million pixels. As three float32 channels of a
# network's input, 36 million pixels take 412 MiB, and their reading less than 1 GiB
SIDE = 6000  # pixels per side of the size to which images are prepared
IMAGE_PIXELS = SIDE * SIDE  # pixels of a picture
IMAGE_BYTES = 160 * MIB  # bytes of a picture's file: that many pixels of four bytes, uncompressed, and a header
JPEG_SCANS = 100  # passes of a JPEG over its pixels: each takes 0.06 s and may have 60 bytes; progressive ones have some ten

# volumes: a CT of the whole body has 2000 slices of 512 x 512. --voxels of `feddp data prepare folder` and `predict` raises it
VOXELS = 512 * 512 * 2048  # voxels of a volume: 4 bytes each in a temporary file, and 2 or 3 in memory
IN_MEMORY = 128 * MIB  # bytes of a volume, or of an unpacked file, above which they lie in a temporary file
VOLUME_START = 16 * MIB  # bytes of a NIfTI file before the first voxel, with the header's extensions
VOLUME_TAIL = MIB  # bytes of a NIfTI file after the last voxel; they are not read

# packed frames of DICOM: the decoder takes 40 bytes per value of JPEG 2000; 30 million pixels take it ten seconds
DECODER_BYTES = 4 * 1024 * MIB  # bytes of the address space of the process that decodes
DECODER_SECONDS = 120  # of a frame
JPEG_TILES = 4096  # tiles of a frame of JPEG 2000: each takes 7 KB before it is read; a mammograph's have 500

# DICOM: a CT slice has 0.5 MiB, a mammograph 30; a segmentation of 256 slices and 5 classes 42 MiB, contours 1 to 20 MiB
DICOM_BYTES = 160 * MIB  # bytes of a DICOM file, unless VOXELS are more: with one byte each of masks, four of images
HEAD_BYTES = 32 * MIB  # bytes of a DICOM file before its pixels, all those of an RTSTRUCT: each takes up to 40 in memory
CONTOUR_STEPS = 2 * 10**10  # pixels, edges and pairs of corners of contours: a body on 300 slices takes 10**9; minutes
STRUCTURES = 255  # structures of a segmentation that are classes; each is read over the whole volume
SERIES_BYTES = 64 * MIB  # bytes of the files of a DICOM series besides their pixels, which stay in memory together
SERIES_FILES = 4096  # files of a DICOM series, or frames of one file: each frame takes 1.3 KB in memory and 0.4 ms

# archives: the public sets have 10 to 40 thousand files
ARCHIVE_FILES = 200_000  # files in a data set's zip or folder
ARCHIVE_DIRECTORY = 16 * MIB  # bytes of the directory of a zip, read whole before the first file: 80 bytes per file
ARCHIVE_RATIO = 1100  # unpacked to packed bytes in a zip: deflate reaches 1032 : 1; more is a false size or an overlap
ARCHIVE_BYTES = 256 * 1024 * MIB  # bytes of all files of a zip, unpacked

# descriptions
JSON_BYTES = MIB  # bytes of dataset.json, metadata of a network's file; parsed, they may take thirty times that memory
CONFIG_BYTES = MIB // 16  # bytes of run.yaml, which holds some forty short lines
PEM_BYTES = MIB // 16  # bytes of a certificate or a key: a key of 16,384 bits has 13 KB
JSON_DEPTH = 32  # levels of a JSON file: our files have six levels
RESULTS_BYTES = 128 * MIB  # bytes of results.json: the means of 100 sites with 100 networks each, of five classes, are 44 MiB
EVENT_BYTES = 256 * MIB  # bytes of progress.jsonl: 1000 rounds of 100 sites are 60 MiB
TABLE_BYTES = 32 * MIB  # bytes of split.csv, or a table that comes with a data set
TABLE_ROWS = 250_000  # rows of a table: as pictures of 96 x 96 pixels in memory: 36 GB
TABLE_LINE = 4096  # characters of a line of a table
FILE_NAME = 255  # bytes of a file's name: the limit of file systems
TEXT = 10_000  # characters of a message or reason
NAME = 255  # characters of the name of a patient, a class or a site
CLASSES = 255  # classes of a data set: a mask has 8 bits, and 0 is the background

# networks: U-Net++ has 16 million parameters; the largest here, FPN with ResNet-50, has 26 million: 105 MB
NETWORK_BYTES = 1024 * MIB  # bytes of a network's file
STORED_BYTES = 64 * 1024 * MIB  # bytes of a site's stored peers: 100 of the largest networks, with an optimiser's state
HEADER_SHARE = 1024  # the divisor: a header takes at most 1/1024 of NETWORK_BYTES or STORED_BYTES
PICKLE_BYTES = 16 * MIB  # bytes of names and shapes in a PyTorch file, without the values
CHANNELS = 16  # channels of an image that a network takes
SIZE = 1024  # pixels per side of the network's input, where attention takes 600 MiB per image; the paper uses 384
LAYER_OPTION = 100_000  # value of an option of a network's layers: virtual classes are sites times classes
SITES = 1000  # sites of a run
