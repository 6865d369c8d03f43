"""Small networks with a real one's layers, for benchmarks of many rounds and for tests."""

from functools import partial

from feddp.networks import DEFAULT, NETWORKS, _smp

FEW = {"embed_dims": (8, 16, 16, 16), "num_heads": (1, 2, 2, 2)}  # a PVTv2's channels and heads, by stage
# the default network's layers and tensors by name, with 107 thousand parameters instead of 5.2 million
narrow = partial(NETWORKS[DEFAULT], **FEW, decoder_pyramid_channels=16, decoder_segmentation_channels=32)
# its decoder normalises groups of two channels, so that it takes a single image of 32 pixels, which is one pixel in the end
paired = partial(narrow, decoder_segmentation_channels=64)
shallow = partial(paired, depths=(1, 1, 1, 1))  # a block of each stage instead of two
# resnet18-fpn's kinds of layers, with 527 thousand parameters instead of 13 million: timm has it for tests
narrow_resnet = partial(_smp, "FPN", "test_resnet", decoder_pyramid_channels=16, decoder_segmentation_channels=64)
