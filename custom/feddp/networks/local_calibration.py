"""FedLC's layers in a network (Wang et al., ECCV 2022): channel selection before the decoder, head calibration after it."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddp.networks.parts import PART_ROLES, parts_of, width_of
from feddp.partition import CALIBRATOR

Pooled = tuple[Tensor, Tensor]  # average- and max-pooled features, (B, C) each

KERNEL, SIGMA = 31, 4.0  # pixels of the decoder's map; the paper states only the kernel's size


class LocalCalibration(nn.Module):
    """`network` with personalized channel selection (PCS) and head calibration (HC); its tensors keep their names.

    Takes over the layers of `network`, which must not be used afterwards. Until `calibrator` receives heads for the first
    time, the segmentation head gives the output; from then on the calibrated head does.

    Args:
        network: has an encoder, a decoder and a segmentation head, as in segmentation-models-pytorch.
        sites: K, the number of entries of a site's one-hot embedding.

    Raises:
        InputError: the network lacks one of these parts.
    """

    roles = {**PART_ROLES, CALIBRATOR: ("embedding", "calibrator")}

    def __init__(self, network: nn.Module, classes: int, sites: int):
        super().__init__()
        width = width_of(network, "FedLC")
        self.encoder, self.decoder, self.segmentation_head, first = parts_of(network, "FedLC")
        self.embedding = SiteEmbedding(sites)
        self.selection = ChannelSelection(width, sites)
        self.calibrator = HeadCalibration(first, classes, sites)
        self.plain: Tensor | None = None  # logits of the segmentation head in the last pass

    def forward(self, x: Tensor) -> Tensor:
        features = list(self.encoder(x))
        features[-1] = self.selection(features[-1], self.embedding.one_hot)
        decoded = self.decoder(features)
        plain: Tensor = self.segmentation_head(decoded)
        self.plain = plain
        if self.calibrator.peers is None:
            return plain
        calibrated: Tensor = self.calibrator(decoded.detach(), self.segmentation_head, self.embedding.index)
        return calibrated

    def contrast(self) -> Tensor:
        """Returns −1/(K−1) Σ_{j≠k} MSE(h_k, h_j) over the features of the last pass: a scalar, no gradient to h_j."""
        pooled = self.selection.pooled
        if pooled is None:
            raise RuntimeError("the contrast needs the features of a forward pass; call the network first")
        own, sites = self.embedding.index, torch.eye(len(self.embedding.one_hot), device=pooled[0].device)
        gates = [self.selection.gate(pooled, one_hot) for one_hot in sites]
        others = [F.mse_loss(gates[own], gate.detach()) for j, gate in enumerate(gates) if j != own]
        return -torch.stack(others).mean()


class SiteEmbedding(nn.Module):
    """The index of this site among the K sites, as a private one-hot buffer, so that it is in the site's file.

    `index` is the same as a number: a pass that read it from the buffer would wait for the GPU.
    """

    one_hot: Tensor

    def __init__(self, sites: int):
        super().__init__()
        self.register_buffer("one_hot", torch.zeros(sites))
        self.index = 0

    def set(self, index: int) -> None:
        self.one_hot.zero_()[index] = 1.0
        self.index = index

    def _load_from_state_dict(self, *arguments: Any) -> None:  # of torch, for each module that a state is loaded into
        super()._load_from_state_dict(*arguments)
        self.index = int(self.one_hot.argmax())


class ChannelSelection(nn.Module):
    """PCS: x ← x·h + x, with a gate h in (0,1)^C computed from pooled features and the site's embedding."""

    def __init__(self, width: int, sites: int, reduction: int = 16):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(sites, width, bias=False), nn.ReLU(), nn.Linear(width, width, bias=False))
        hidden = max(1, width // reduction)
        self.fuse = nn.Sequential(nn.Linear(2 * width, hidden, bias=False), nn.ReLU(), nn.Linear(hidden, width, bias=False))
        self.pooled: Pooled | None = None  # of the last pass, detached, for `LocalCalibration.contrast`

    def forward(self, x: Tensor, one_hot: Tensor) -> Tensor:
        """x (B, C, H, W), the deepest encoder features; one_hot (K,) -> (B, C, H, W)."""
        pooled = x.mean(dim=(2, 3)), x.amax(dim=(2, 3))
        # used after the mixed-precision pass
        self.pooled = pooled[0].detach().float(), pooled[1].detach().float()
        return x * self.gate(pooled, one_hot)[:, :, None, None] + x

    def gate(self, pooled: Pooled, one_hot: Tensor) -> Tensor:
        """Returns h (B, C), the sigmoid of the sum over average- and max-pooled features, (B, C) each."""
        site = self.embed(one_hot.to(pooled[0])).expand_as(pooled[0])
        average, peak = (self.fuse(torch.cat((each, site), dim=1)) for each in pooled)
        return torch.sigmoid(average + peak)


class HeadCalibration(nn.Module):
    """HC: standard deviation and mean of all sites' predictions gate the decoder's features, the input of a new 3 × 3 head.

    The heads of the other sites are buffers, so a site's file suffices for prediction, as in FedLC's inference. `peers` says
    which of them are known, without reading the buffers `known` and `active`, which would wait for the GPU in every pass.
    """

    weights: Tensor
    biases: Tensor
    known: Tensor
    active: Tensor
    gaussian: Tensor

    def __init__(self, head: nn.Conv2d, classes: int, sites: int):
        super().__init__()
        weight = head.weight
        self.out = nn.Conv2d(2 * classes * weight.shape[1], classes, 3, padding=1)
        self.register_buffer("weights", torch.zeros(sites, *weight.shape))
        self.register_buffer("biases", torch.zeros(sites, len(weight)))
        self.register_buffer("known", torch.zeros(sites, dtype=torch.bool))
        self.register_buffer("active", torch.tensor(False))
        self.register_buffer("gaussian", _gaussian(KERNEL, SIGMA), persistent=False)
        self.peers: tuple[int, ...] | None = None  # the sites with known heads; None until heads are received

    def receive(self, heads: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Replaces the stored heads of the other sites by `heads`: {site's index: {"weight", "bias"}}."""
        self.active.fill_(True)
        self.known.zero_()
        for index, head in heads.items():
            self.known[index] = True
            self.weights[index], self.biases[index] = head["weight"], head["bias"]
        self.peers = tuple(sorted(heads))

    def _load_from_state_dict(self, *arguments: Any) -> None:  # of torch, for each module that a state is loaded into
        super()._load_from_state_dict(*arguments)
        self.peers = tuple(self.known.nonzero().flatten().tolist()) if self.active else None

    def forward(self, decoded: Tensor, head: nn.Sequential, index: int) -> Tensor:
        """decoded (B, F, h, w) -> logits (B, classes, H, W); `head` is this site's head, `index` its place among the sites."""
        first, *rest = head
        assert isinstance(first, nn.Conv2d)
        deviation, mean = self.disagreement(decoded, first, index)
        gates = torch.cat((deviation, mean), dim=1)
        gated = torch.cat([decoded * self.soften(gate[:, None]) + decoded for gate in gates.unbind(dim=1)], dim=1)
        logits: Tensor = self.out(gated)
        for layer in rest:  # the head's upsampling
            logits = layer(logits)
        return logits

    @torch.no_grad()
    def disagreement(self, decoded: Tensor, own: nn.Conv2d, index: int) -> tuple[Tensor, Tensor]:
        """Returns population standard deviation and mean, (B, C, h, w) each, of the probabilities of all known heads."""
        maps = [_probabilities(own(decoded))]
        for j in self.peers or ():
            if j != index:
                # not functional_call, which cannot be traced (`feddp.export`)
                maps.append(_probabilities(own._conv_forward(decoded, self.weights[j], self.biases[j])))
        stacked = torch.stack(maps)
        return stacked.std(dim=0, unbiased=False), stacked.mean(dim=0)

    def soften(self, gate: Tensor) -> Tensor:
        """Returns max(gate, its Gaussian smoothing scaled to [0, 1] per image), (B, 1, h, w).

        The padding is 0, as in the released code, so a smoothed constant gate is lower at the border.
        """
        smooth = F.conv2d(gate, self.gaussian, padding=KERNEL // 2)
        low, high = smooth.amin(dim=(2, 3), keepdim=True), smooth.amax(dim=(2, 3), keepdim=True)
        return torch.maximum((smooth - low) / (high - low + 1e-8), gate)


def _probabilities(logits: Tensor) -> Tensor:
    """Returns the probabilities; 0.5 for NaN, which a peer's head with finite but huge values can produce."""
    return torch.sigmoid(logits.float()).nan_to_num(0.5)


def _gaussian(size: int, sigma: float) -> Tensor:
    """Returns a Gaussian kernel (1, 1, size, size) with sum 1."""
    line = torch.exp(-0.5 * ((torch.arange(size) - size // 2) / sigma) ** 2)
    kernel = torch.outer(line, line)
    return (kernel / kernel.sum())[None, None]
