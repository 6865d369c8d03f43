"""Networks by name: shape, size, seeds, and attention with separate key and value layers."""

import copy
import re

import pytest
import segmentation_models_pytorch as smp
import timm
import torch
from timm.models.pvt_v2 import Attention
from torch import nn

from feddp.errors import FedDPError
from feddp.networks import DEFAULT, LAYERS, NETWORKS, build
from feddp.networks.attention import SplitAttention, split_kv
from feddp.networks.lora import AdaptedLinear
from feddp.networks.spatial_adapter import Residual
from feddp.networks.weights import load_checkpoint, save_network
from feddp.partition import ADAPTER, DECODER, ENCODER, HEAD, KEY, NORM, PERSONAL_HEAD, QUERY, SPATIAL_ADAPTER, VALUE, resolve

RESNET, SMALL_IMAGES = "resnet18-fpn", "pvt_v2_b0_s-fpn"
ONE_OF_A_KIND = (DEFAULT, SMALL_IMAGES, RESNET, "unet", "unetplusplus", "resunet")
DECODERS = (DEFAULT, RESNET, "unet", "unetplusplus", "resunet")  # what lies behind an encoder does not see how it attends


@pytest.fixture(scope="module")
def network():
    return build(DEFAULT, 3, 2, seed=0).eval()


def count(network, names):
    state = network.state_dict()
    return sum(state[name].numel() for name in names)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_gives_logits_of_the_image_s_size(name):
    network = build(name, 1, 2, seed=0).eval()
    nn.init.constant_(network.segmentation_head[0].bias, -10)
    logits = network(torch.randn(1, 1, 64, 96))
    assert logits.shape == (1, 2, 64, 96)
    assert logits.max() < 0  # no sigmoid has been applied


def test_the_default_has_the_paper_s_size():
    """FedDP's network: 5.2 M parameters, 19.7 MiB in fp32. Ours, with one class: 5,165,793 · 4 / 2²⁰ = 19.706."""
    parameters = sum(p.numel() for p in build(DEFAULT, 3, 1, seed=0).parameters())
    assert parameters == 5_165_793
    assert parameters * 4 / 2**20 == pytest.approx(19.7, abs=0.05)


def test_local_query_is_sixteen_tensors(network):
    """pvt_v2_b0 has 2 blocks at each of 4 stages, 32, 64, 160 and 256 wide; a query layer has dim² + dim parameters:

    2·(32² + 32) + 2·(64² + 64) + 2·(160² + 160) + 2·(256² + 256) = 2,112 + 8,320 + 51,520 + 131,584 = 193,536.
    """
    private = resolve(network, (QUERY,)).private
    assert len(private) == 16
    assert count(network, private) == 193_536
    assert private[0] == "encoder.model.stages_0.blocks.0.attn.q.weight"
    for role in (KEY, VALUE):
        assert count(network, resolve(network, (role,)).private) == 193_536


@pytest.mark.parametrize(
    ("name", "size", "expected"),
    [
        (DEFAULT, 96, [9, 9, 9, 9]),
        (SMALL_IMAGES, 96, [144, 144, 36, 9]),
        (DEFAULT, 384, [144, 144, 144, 144]),
        (SMALL_IMAGES, 384, [2304, 2304, 576, 144]),
        (SMALL_IMAGES, 64, [64, 64, 16, 4]),
        (DEFAULT, 64, [4, 4, 4, 4]),
    ],
)
def test_keys_of_each_stage(name, size, expected):
    """Stages see maps of size/4, size/8, size/16 and size/32 pixels a side; a ratio r leaves (side / r)² keys.

    At 96 px the sides are 24, 12, 6, 3. The default's ratios (8, 4, 2, 1) leave 3² = 9 keys at every stage; (2, 1, 1, 1)
    leave 12² = 144, 12² = 144, 6² = 36 and 3² = 9: the last two maps have no more tokens than that. At 64 px the sides are
    16, 8, 4, 2: 2² = 4 keys at every stage, against 8² = 64, 8² = 64, 4² = 16 and 2² = 4. At 384 px, the paper's, they are
    96, 48, 24, 12: 12² = 144 at every stage, against 48² = 2304, 48² = 2304, 24² = 576 and 12² = 144.
    """
    network, keys = build(name, 3, 1, seed=0).eval(), {}
    for path, module in network.named_modules():
        if isinstance(module, SplitAttention):
            module.k.register_forward_hook(lambda _, __, output, path=path: keys.update({path: output.shape[1]}))
    with torch.no_grad():
        network(torch.zeros(1, 3, size, size))
    assert list(keys.values()) == [count for count in expected for _ in range(2)]  # two blocks a stage


def test_the_network_for_small_images_differs_in_spatial_reduction_alone(network):
    """5,165,793 - 460,096 = 4,705,697 parameters with one class.

    At each of a stage's two blocks, reduction by r > 1 is a convolution of dim² r² + dim and a normalisation of 2 dim.
    Ratios (8, 4, 2, 1) against (2, 1, 1, 1):

    stage 1: 32² (8² - 2²) = 61,440 fewer; stage 2: 64² 4² + 3·64 = 65,728 fewer; stage 3: 160² 2² + 3·160 = 102,880 fewer;
    stage 4: no reduction in either. 2 (61,440 + 65,728 + 102,880) = 460,096.

    Queries, keys and values are the default's: 16 tensors and 193,536 parameters each.
    """
    one_class = build(SMALL_IMAGES, 3, 1, seed=0)
    assert sum(p.numel() for p in one_class.parameters()) == 4_705_697
    other = build(SMALL_IMAGES, 3, 2, seed=0)
    missing = network.state_dict().keys() - other.state_dict().keys()
    assert other.state_dict().keys() < network.state_dict().keys()
    # stages 2 and 3: two blocks with weight and bias of the convolution and of the normalisation
    assert len(missing) == 2 * 2 * 4
    assert all(re.search(r"stages_[12]\.blocks\.\d\.attn\.(sr|norm)\.", name) for name in missing)
    for role in (QUERY, KEY, VALUE, HEAD, DECODER):
        assert resolve(other, (role,)).private == resolve(network, (role,)).private
    assert set(resolve(other, (NORM,)).private) == set(resolve(network, (NORM,)).private) - missing
    assert count(other, resolve(other, (QUERY,)).private) == 193_536


@pytest.mark.parametrize("name", ONE_OF_A_KIND)
def test_the_roles_of_a_network_cover_it_once(name):
    network = build(name, 3, 2, seed=0)
    parts = [set(resolve(network, (role,)).private) for role in (ENCODER, DECODER, HEAD)]
    assert sum(len(part) for part in parts) == len(set().union(*parts)) == len(network.state_dict())
    assert parts[2] == {"segmentation_head.0.weight", "segmentation_head.0.bias"}


@pytest.mark.parametrize("name", ONE_OF_A_KIND)
def test_a_network_is_encoder_decoder_and_head_in_turn(name):
    network, image = build(name, 3, 2, seed=0).eval(), torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        maps = network.encoder(image)
        assert torch.equal(network(image), network.segmentation_head(network.decoder(maps)))
    assert [m.shape[1] for m in maps] == list(network.encoder.out_channels)
    sizes = [m.shape[-1] for m in maps]
    assert sizes == sorted(sizes, reverse=True)
    assert isinstance(network.segmentation_head, nn.Sequential)
    assert network.segmentation_head[0].out_channels == 2


@pytest.mark.parametrize("name", DECODERS)
def test_local_calibration_goes_round_every_decoder(name):
    network = build(name, 3, 1, seed=0, layers={"local_calibration": {"sites": 3}}).eval()
    network.embedding.set(0)
    image = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    head = {key: tensor + 0.1 for key, tensor in network.segmentation_head[0].state_dict().items()}
    with torch.no_grad():
        assert torch.equal(network(image), network.plain)
        network.calibrator.receive({1: head})
        logits = network(image)
    assert logits.shape == (1, 1, 64, 64)
    assert not torch.equal(logits, network.plain)


@pytest.mark.parametrize("name", DECODERS)
def test_decoupled_heads_go_round_every_decoder(name):
    """The personal head starts at 0; the logits' gradient reaches it alone, the generic logits' everything else."""
    plain = build(name, 3, 1, seed=0).eval()
    network = build(name, 3, 1, seed=0, layers={"personal_head": {}}).eval()
    image = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    logits = network(image)
    assert torch.equal(logits, plain(image))
    own = set(resolve(network, (PERSONAL_HEAD,)).private)
    assert own == {"personal_head.0.weight", "personal_head.0.bias"}
    logits.sum().backward()
    assert {n for n, p in network.named_parameters() if p.grad is not None} == own
    network.zero_grad(set_to_none=True)
    network.generic.sum().backward()
    assert {n for n, p in network.named_parameters() if p.grad is not None} >= {"segmentation_head.0.weight"}
    assert all(network.get_parameter(n).grad is None for n in own)
    assert all(p.grad is not None for n, p in network.named_parameters() if n.startswith("decoder."))


@pytest.mark.parametrize("name", DECODERS)
def test_a_spatial_adapter_goes_between_every_decoder_and_head(name):
    """Its 11 tensors over F channels: two convolutions of 9 F² + F and one of F², three normalisations of 2 F: 19 F² + 8 F. Its
    weights and the encoder's get a gradient, and the rest has the names and values that it has without them."""
    plain = build(name, 3, 1, seed=0)
    network = build(name, 3, 1, seed=0, layers={"spatial_adapter": {}})
    own = set(resolve(network, (SPATIAL_ADAPTER,)).private)
    width = network.segmentation_head[0].in_channels
    state = network.state_dict()
    assert len(own) == 11
    assert sum(state[key].numel() for key in own) == 19 * width**2 + 8 * width
    assert state.keys() - own == plain.state_dict().keys()
    assert all(torch.equal(state[key], value) for key, value in plain.state_dict().items())
    logits = network(torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)))
    assert logits.shape == (2, 1, 64, 64)
    logits.square().mean().backward()
    assert all(parameter.grad.any() for key, parameter in network.named_parameters() if key in own and "bias" not in key)
    assert network.encoder.get_parameter(next(n for n, _ in network.encoder.named_parameters())).grad.any()


def test_a_spatial_adapter_adds_two_convolutions_and_one():
    """Each channel of each image is v = [−√2, 0, 0, √2] in an order, scaled and shifted: mean 0, variance 1 once normalised.
    All convolutions are multiples of the identity.

    First 5 x, normalised v, ReLU [0, 0, 0, √2]: mean √2/4, variance 1/2 − 1/8 = 3/8, normalised [−1, −1, −1, 3]/√3, times 2
    plus 2. Beside it 3 x, normalised v. The sum is [2 − 2/√3 − √2, 2 − 2/√3, 2 − 2/√3, 2 + 2√3 + √2] = [−0.569, 0.8453,
    0.8453, 6.8783], and ReLU makes the first 0. (Without the inner ReLU 3 v + 2.)
    """
    block = Residual(2)
    with torch.no_grad():
        for value in block.state_dict().values():
            value.zero_()
        for convolution, factor in ((block.body[0], 5.0), (block.body[3], 1.0), (block.skip[0], 3.0)):
            middle = convolution.kernel_size[0] // 2
            convolution.weight[:, :, middle, middle] = factor * torch.eye(2)
        for norm, scale, shift in ((block.body[1], 1.0, 0.0), (block.body[4], 2.0, 2.0), (block.skip[1], 1.0, 0.0)):
            norm.weight.fill_(scale)
            norm.bias.fill_(shift)
    v, wanted = torch.tensor([-(2**0.5), 0, 0, 2**0.5]), torch.tensor([0, 0.845299, 0.845299, 6.878315])
    images = torch.stack([torch.stack([v, 10 + 3 * v.flip(0)]), torch.stack([7 * v, -v.roll(1)])])
    found = block(images.reshape(2, 2, 2, 2)).flatten(2)
    expected = torch.stack([torch.stack([wanted, wanted.flip(0)]), torch.stack([wanted, wanted[[0, 3, 2, 1]]])])
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("rank", [1, 4])
def test_adapters_of_rank_r_are_48_tensors_beside_the_base(network, rank):
    """An adapter of a layer d wide has 2 r d parameters; 2 blocks at each of d = 32, 64, 160, 256, each with q, k and v:

    2 · 3 · 2 r (32 + 64 + 160 + 256) = 6144 r in 2 · 4 · 3 · 2 = 48 tensors. The base has the names, values and function that
    it has without them.
    """
    adapted = build(DEFAULT, 3, 2, seed=0, layers={"lora": {"rank": rank}}).eval()
    adapters = resolve(adapted, (ADAPTER,)).private
    assert (len(adapters), count(adapted, adapters)) == (48, 6144 * rank)
    state, base = adapted.state_dict(), network.state_dict()
    assert state.keys() - set(adapters) == base.keys()
    assert all(torch.equal(state[name], value) for name, value in base.items())
    image = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(adapted(image), network(image))


def test_an_adapter_adds_its_product():
    """x = 1, W = 2, b = 1, A = 3. With B = 5: 2 + 1 + 5 · 3 = 18. At B = 0 the gradient of A is B = 0, that of B is A = 3."""
    layer = nn.Linear(1, 1)
    nn.init.constant_(layer.weight, 2.0)
    nn.init.constant_(layer.bias, 1.0)
    layer = AdaptedLinear(layer, rank=1)
    nn.init.constant_(layer.lora_a.weight, 3.0)
    layer(torch.ones(1)).backward()
    assert (layer.lora_a.weight.grad.item(), layer.lora_b.weight.grad.item(), layer.weight.grad.item()) == (0, 3, 1)
    nn.init.constant_(layer.lora_b.weight, 5.0)
    assert layer(torch.ones(1)).item() == 18


def test_a_network_without_attention_takes_no_adapters():
    with pytest.raises(FedDPError, match="FPN has no attention for LoRA's adapters; take a network on PVTv2"):
        build(RESNET, 3, 1, seed=0, layers={"lora": {"rank": 4}})


def test_norm_takes_a_convolutional_network_s_counters_along():
    """ResNet-18 has 20 batch normalisations (2 in each of 8 blocks, the stem, 3 in shortcuts) of 5 tensors each.

    The decoder has 7 group normalisations (3 + 2 + 1 + 1 convolutions) of 2.
    """
    private = resolve(build(RESNET, 3, 1, seed=0), (NORM,)).private
    assert len(private) == 20 * 5 + 7 * 2
    assert "encoder.model.bn1.num_batches_tracked" in private


def test_a_network_without_attention_has_no_query():
    with pytest.raises(FedDPError, match="'query' selects no tensor of FPN"):
        resolve(build(RESNET, 3, 1, seed=0), (QUERY,))


@pytest.fixture(scope="module")
def fused():
    torch.manual_seed(1)
    return smp.FPN("tu-pvt_v2_b0", encoder_weights=None, in_channels=3, classes=2).eval()


def test_a_fused_network_is_refused(fused):
    with pytest.raises(FedDPError, match=r"stages_0\.blocks\.0\.attn\.kv' fuses query"):
        resolve(fused, (QUERY,))


def test_splitting_keeps_the_function(fused):
    """128 pixels: all four ratios of spatial reduction (8, 4, 2, 1) see more than one token."""
    image = torch.randn(2, 3, 128, 128, generator=torch.Generator().manual_seed(0))
    split = split_kv(copy.deepcopy(fused))
    assert sum(isinstance(module, SplitAttention) for module in split.modules()) == 8
    assert not any(type(module) is Attention for module in split.modules())
    with torch.no_grad():
        expected, got = fused(image), split(image)
    torch.testing.assert_close(got, expected, atol=1e-4 * expected.abs().max().item(), rtol=0)
    assert sum(p.numel() for p in split.parameters()) == sum(p.numel() for p in fused.parameters())


def test_key_is_the_first_half(fused):
    """The outputs' equality could not tell a swap where softmax is flat; the tensors can."""
    name = "encoder.model.stages_3.blocks.1.attn"
    split = split_kv(copy.deepcopy(fused)).state_dict()
    both = torch.cat([split[f"{name}.k.weight"], split[f"{name}.v.weight"]])
    assert torch.equal(both, fused.state_dict()[f"{name}.kv.weight"])


def test_in_bfloat16_on_a_cpu_attention_is_not_fused(monkeypatch):
    """Its rounding errors are those of fused attention in bfloat16, to a factor of two either way."""
    torch.manual_seed(2)
    split = split_kv(nn.Sequential(Attention(8, num_heads=2)))[0].eval()
    for layer in (split.q, split.k):
        nn.init.normal_(layer.weight)  # timm's small start would leave the softmax flat
    tokens, fused, calls = torch.randn(8, 16, 8), nn.functional.scaled_dot_product_attention, []
    monkeypatch.setattr(
        nn.functional, "scaled_dot_product_attention", lambda *args, **kw: calls.append(1) or fused(*args, **kw)
    )

    def computed(mixed: bool) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            return split(tokens, (4, 4)).float()

    plain = computed(mixed=False)
    assert calls == [1]
    rounded = computed(mixed=True)
    assert calls == [1]
    monkeypatch.setattr(SplitAttention, "fused_attn", True)
    other = computed(mixed=True)
    assert calls == [1, 1]
    assert 0.5 < (rounded - plain).norm() / (other - plain).norm() < 2


@pytest.mark.parametrize("arguments", [{"sr_ratio": 2}, {"linear_attn": True}, {"qkv_bias": False}])
def test_every_kind_of_attention_splits_gradients_too(arguments):
    torch.manual_seed(2)
    whole = Attention(8, num_heads=2, **arguments).double()
    nn.init.normal_(whole.kv.weight)  # timm's small start would hide key and value behind a flat softmax
    split = split_kv(nn.Sequential(copy.deepcopy(whole)))[0]
    tokens = torch.randn(2, 16 * 16, 8, dtype=torch.float64)
    for attention in (whole, split):
        attention(tokens, (16, 16)).square().sum().backward()
    gradient = torch.cat([split.k.weight.grad, split.v.weight.grad])
    torch.testing.assert_close(gradient, whole.kv.weight.grad)
    torch.testing.assert_close(split.q.weight.grad, whole.q.weight.grad)


def test_a_split_network_can_be_copied(network):
    copied = copy.deepcopy(network)
    assert resolve(copied, (QUERY, HEAD)) == resolve(network, (QUERY, HEAD))
    assert copied.state_dict().keys() == network.state_dict().keys()


def test_a_seed_fixes_the_network_and_leaves_torch_alone(network):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    again, other = build(DEFAULT, 3, 2, seed=0).state_dict(), build(DEFAULT, 3, 2, seed=1).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    name = "encoder.model.stages_0.blocks.0.attn.k.weight"
    assert all(torch.equal(again[key], value) for key, value in network.state_dict().items())
    assert not torch.equal(other[name], again[name])


def test_networks_of_one_seed_are_equal_and_nobody_elses(monkeypatch):
    """Also where the first was changed before the second was asked for: what was drawn is kept, and only copies are given."""
    drawn = []
    monkeypatch.setitem(NETWORKS, "counted", lambda *given, pretrained: drawn.append(given) or torch.nn.Linear(2, 2))
    first = build("counted", 1, 1, seed=0)
    value = first.weight.detach().clone()
    torch.nn.init.zeros_(first.weight)
    first.extra = torch.nn.Linear(2, 2)
    second = build("counted", 1, 1, seed=0)
    assert torch.equal(second.weight, value)
    assert not hasattr(second, "extra")
    assert drawn == [(1, 1)]
    with torch.device("meta"):
        assert build("counted", 1, 1, seed=0).weight.is_meta
    build("counted", 1, 2, seed=0)
    assert drawn == [(1, 1), (1, 1), (1, 2)]


def test_layers_that_took_the_place_of_others_are_built(monkeypatch):
    def filled(network, value):
        torch.nn.init.constant_(network.bias, value)
        return network

    monkeypatch.setitem(NETWORKS, "small", lambda *given, pretrained: torch.nn.Linear(2, 2))
    for value in (1.0, 2.0):
        monkeypatch.setitem(LAYERS, "mine", lambda network, _, value=value: filled(network, value))
        assert build("small", 1, 1, seed=0, layers={"mine": {}}).bias.tolist() == [value, value]


def test_options_that_are_equal_but_of_another_type_are_others():
    """1 == 1.0 == True in Python; a rank of 1.0 has no layer, and one that was drawn before with 1 must not stand for it."""
    assert build(DEFAULT, 3, 1, seed=0, layers={"lora": {"rank": 1}})
    with pytest.raises(TypeError):
        build(DEFAULT, 3, 1, seed=0, layers={"lora": {"rank": 1.0}})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("unet9000", 3, 1), "unknown network 'unet9000'; the networks are pvt_v2_b0-fpn, pvt_v2_b1-fpn"),
        ((DEFAULT, 3, 1, "imagenet"), "unknown weights 'imagenet'"),
        ((DEFAULT, 3, 0), "at least one channel and one class"),
    ],
)
def test_bad_requests_are_answered(arguments, message):
    with pytest.raises(FedDPError, match=message):
        build(*arguments)


@pytest.mark.parametrize(("name", "encoder"), [(DEFAULT, "pvt_v2_b0"), ("unetplusplus", "resnet18"), ("resunet", "resnet18")])
def test_weights_that_cannot_be_fetched_are_answered_with_the_remedy(monkeypatch, name, encoder):
    create = timm.create_model

    def offline(model_name, pretrained=False, **options):
        assert model_name == encoder
        if pretrained:
            raise OSError("no route to host")
        return create(model_name, **options)

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(FedDPError, match=f"'{encoder}' cannot be fetched .*load_checkpoint"):
        build(name, 3, 1, weights="timm")


def test_published_weights_do_not_fit_the_network_for_small_images(tmp_path):
    """timm would fail with a list of shapes; a file of the public weights is refused whole, too."""
    with pytest.raises(FedDPError, match=r"'pvt_v2_b0' do not fit this network, whose sr_ratios \(2, 1, 1, 1\) .* leave"):
        build(SMALL_IMAGES, 3, 1, weights="timm")
    network = build(SMALL_IMAGES, 3, 1, seed=0)
    before = copy.deepcopy(network.state_dict())
    torch.save(timm.create_model("pvt_v2_b0").state_dict(), tmp_path / "pvt_v2_b0.pth")
    with pytest.raises(FedDPError, match=r"pvt_v2_b0.pth does not fit .*attn\.sr\.weight \(unexpected\)"):
        load_checkpoint(network, tmp_path / "pvt_v2_b0.pth")
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())


@pytest.mark.parametrize("name", ["unetplusplus", "resunet"])
def test_timm_weights_reach_the_encoder(monkeypatch, name):
    """What timm gives when asked for pretrained weights is the encoder."""
    fetched, create = [], timm.create_model

    def online(model_name, pretrained=False, **options):
        made = create(model_name, **options)
        if pretrained:
            fetched.append(made)
        return made

    monkeypatch.setattr(timm, "create_model", online)
    network = build(name, 3, 1, weights="timm")
    assert fetched == [network.encoder.model]


# -- U-Net -----------------------------------------------------------------------------------------------------------


def test_unet_has_the_size_of_iop_fl_s():
    """32 features first, three channels in, one class out; convolutions without bias, each with a batch normalisation.

    Two 3 x 3 convolutions i -> o -> o and their normalisations have 9·o·(i + o) + 4·o parameters:
        encoder  3>32 10,208; 32>64 55,552; 64>128 221,696; 128>256 885,760; 256>512 3,540,992:  4,714,208
        decoder  512>256 1,770,496; 256>128 442,880; 128>64 110,848; 64>32 27,776:               2,352,000
    A transposed 2 x 2 convolution i -> i/2 with bias has 2·i² + i/2:
        decoder  512 524,544; 256 131,200; 128 32,832; 64 8,224:                                   696,800
    The head has 32 + 1. Together 7,763,041; with two classes, as IOP-FL's softmax, 33 more.
    """
    network = build("unet", 3, 1, seed=0)
    parts = [sum(p.numel() for p in part.parameters()) for part in (network.encoder, network.decoder, network)]
    assert parts == [4_714_208, 2_352_000 + 696_800, 7_763_041]
    assert sum(p.numel() for p in build("unet", 3, 2, seed=0).parameters()) == 7_763_041 + 33


def test_unet_s_normalisations_bring_their_buffers():
    """9 pairs of convolutions, so 18 batch normalisations of 5 tensors, three of them buffers; none is elsewhere."""
    network = build("unet", 3, 1, seed=0)
    private = resolve(network, (NORM,)).private
    assert len(private) == 18 * 5
    assert len(dict(network.named_buffers())) == 18 * 3
    assert set(dict(network.named_buffers())) < set(private)


def test_unet_halves_the_resolution_four_times():
    maps = build("unet", 1, 1, seed=0).eval().encoder(torch.zeros(1, 1, 32, 48))
    assert [tuple(m.shape[1:]) for m in maps] == [(32, 32, 48), (64, 16, 24), (128, 8, 12), (256, 4, 6), (512, 2, 3)]


def test_every_layer_of_unet_takes_part():
    network = build("unet", 1, 1, seed=0)
    network(torch.randn(2, 1, 32, 32, generator=torch.Generator().manual_seed(0))).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in network.parameters())


def test_unet_has_no_published_weights(tmp_path):
    with pytest.raises(FedDPError, match="public weights for 'unet'; leave the weights out"):
        build("unet", 3, 1, weights="timm")
    network = build("unet", 3, 1, seed=0)
    torch.save({"conv1.weight": torch.zeros(64, 3, 7, 7)}, tmp_path / "resnet.pth")
    with pytest.raises(FedDPError, match="resnet.pth has no tensor of UNet.* name a file of this network"):
        load_checkpoint(network, tmp_path / "resnet.pth")
    save_network(tmp_path / "own.safetensors", build("unet", 3, 1, seed=1).state_dict(), {})
    load_checkpoint(network, tmp_path / "own.safetensors")
    assert torch.equal(network.segmentation_head[0].weight, build("unet", 3, 1, seed=1).segmentation_head[0].weight)


@pytest.mark.parametrize("name", ["unetplusplus", "resunet"])
def test_a_checkpoint_of_the_encoder_loads(tmp_path, name):
    torch.manual_seed(4)
    imagenet = timm.create_model("resnet18", num_classes=7)
    torch.save(imagenet.state_dict(), tmp_path / "resnet18.pth")
    network = build(name, 3, 1, seed=0)
    load_checkpoint(network, tmp_path / "resnet18.pth")
    assert torch.equal(network.encoder.model.conv1.weight, imagenet.conv1.weight)
