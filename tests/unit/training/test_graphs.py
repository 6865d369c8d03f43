"""Which networks are captured as CUDA graphs, when anew, and what stays; on a pretended GPU, which captures nothing."""

import copy

import pytest
import torch
from torch import nn

from feddp.errors import InputError
from feddp.training import graphs
from feddp.training.loop import adamw, fit_epoch
from feddp.training.settings import Training
from support.pretended_gpu import pretended_gpu

SHAPE = (2, 1, 4, 4)
cast = []  # whether each capture computed in bfloat16, and whether torch kept the cast weights, which a capture refuses


@pytest.fixture
def captures(monkeypatch):
    """The shapes of what is captured, on a pretended GPU."""
    found = []
    cast.clear()
    with pretended_gpu():
        real = torch.cuda.make_graphed_callables

        def noted(module, images, **named):
            found.append(tuple(images[0].shape))
            cast.append((torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()))  # the pretended GPU's
            assert named["allow_unused_input"], "a layer may go unused"
            return real(module, images, **named)

        monkeypatch.setattr(torch.cuda, "make_graphed_callables", noted)
        yield found


def network(device="cuda") -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Conv2d(2, 1, 1)).to(device)


def samples(count):
    rng = torch.Generator().manual_seed(1)
    image = torch.rand(count, 1, 4, 4, generator=rng).cuda()
    return [{"image": one, "mask": (one > 0.5).float(), "stem": "", "patient": ""} for one in image]


def epoch(made, count=4, graphs=True, **more):
    training = Training(batch=2, augment=False, cuda_graphs=graphs)
    return fit_epoch(
        made, adamw(made, 0.1, 0.0), samples(count), lambda z, b: (z - b["mask"]).square().mean(), training, 0, **more
    )


def test_a_capture_is_made_once_for_the_same_tensors(captures):
    made = network()
    state = {name: value + 1 for name, value in made.state_dict().items()}
    for _ in range(2):
        epoch(made)
        made.load_state_dict(state)  # their values may change
    assert captures == [SHAPE]


def test_frozen_layers_another_size_and_moved_tensors_are_captured_anew(captures):
    made = network()
    epoch(made)
    made[0].requires_grad_(False)
    epoch(made)
    epoch(made, count=1)
    made[0].requires_grad_(True)
    epoch(made)  # as the first
    assert captures == [SHAPE, SHAPE, (1, 1, 4, 4)]
    made[2].weight = nn.Parameter(made[2].weight.detach().clone())
    epoch(made)
    made[1].running_mean = made[1].running_mean.clone()
    epoch(made)
    made[0].weight = nn.Parameter(made[0].weight.detach())  # in the same memory; a graph has the other's gradient
    epoch(made)
    made[1].track_running_stats = False  # as `frozen` does
    epoch(made)
    assert captures[3:] == [SHAPE] * 4


@pytest.mark.parametrize("form", [lambda value: value, lambda value: (1, value)])
def test_a_layer_that_keeps_a_result_of_its_own_is_not_replayed(captures, form):
    """FedLC's contrast reads one, for example: of the batch, which a graph would leave as it was."""

    class Keeping(nn.Conv2d):
        def forward(self, images):
            self.seen = form(images.mean())
            return super().forward(images)

    made = nn.Sequential(Keeping(1, 1, 1)).to("cuda").train()
    run = graphs.replayed(made, SHAPE, False)
    assert graphs.replayed(made, (1, 1, 4, 4), True) is run is made
    assert captures == []
    assert run(torch.full(SHAPE, 3.0).cuda()).shape == SHAPE
    assert torch.utils._pytree.tree_leaves(made[0].seen)[-1].item() == 3
    assert not graphs.leave(made), "there is nothing to try again without"


def test_bfloat16_is_captured_for_itself(captures):
    made = network()
    for mixed in (False, True, False):
        graphs.replayed(made.train(), SHAPE, mixed)
    assert captures == [SHAPE, SHAPE]
    assert cast == [(False, False), (True, False)]


def test_a_capture_moves_no_running_statistics(captures):
    """Before it, torch computes some times; in training each of these would move them."""
    made = network().train()
    before = copy.deepcopy(made.state_dict())
    graphs.replayed(made, SHAPE, False)
    assert captures
    assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())


def test_the_network_itself_stays_as_it_is(captures):
    """Prediction, in eval mode, and a batch of another size compute with it."""
    made = network().train()
    run = graphs.replayed(made, SHAPE, False)
    assert "forward" not in vars(made)
    calls = []
    made.register_forward_hook(lambda *_: calls.append(1))
    images = torch.rand(SHAPE).cuda()
    run(images)
    assert not calls, "of the captured size: the graph"
    run(images[:1])
    assert calls == [1]


def test_a_network_with_hooks_is_not_captured(captures):
    """A graph would not call them. Each kind, on a layer."""
    for kind in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"):
        made = network()
        getattr(made[0], f"register_{kind}")(lambda *_: None)
        assert graphs.replayed(made, SHAPE, False) is made
    assert captures == []


def test_what_cannot_be_captured(captures):
    """A network on the CPU, one that trains nothing, one whose forward is replaced, an epoch with its own forward."""
    frozen, replaced, on_cpu = network().requires_grad_(False), network(), network("cpu")
    replaced.forward = lambda images: images
    for made in (frozen, replaced, on_cpu):
        assert graphs.replayed(made, SHAPE, False) is made
    assert "_feddp_graphs" not in vars(on_cpu)
    made = network()
    epoch(made, forward=made)
    assert captures == []


def test_a_network_that_cuda_cannot_capture_is_an_error_with_its_remedy(captures, monkeypatch):
    def refused(module, images, **_):
        module.forward = None  # half done
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", refused)
    made = network()
    with pytest.raises(InputError) as caught:
        epoch(made)
    assert str(caught.value) == (
        "CUDA cannot capture this network as graphs (operation not permitted when stream is capturing); submit the job without"
        " --set cuda_graphs=true"
    )
    assert "forward" not in vars(made)


def test_one_value_per_channel_is_the_same_error_as_without_graphs(captures):
    (sample,) = samples(1)
    one = [sample | {"image": sample["image"][:, :1, :1]}]
    for chosen in (Training(cuda_graphs=True, augment=False), Training(augment=False)):
        made = network()
        with pytest.raises(InputError, match=r"features of 1 image\(s\) of 1 pixels have one value per channel"):
            fit_epoch(made, adamw(made, 0.1, 0.0), one, lambda z, _: z.sum(), chosen, 0)
        assert "forward" not in vars(made)


def test_without_the_setting_nothing_is_captured(captures):
    epoch(network(), graphs=False)
    assert captures == []


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("CUDA error: out of memory")])
def test_a_gpu_that_is_too_full_for_a_capture(captures, monkeypatch, error):
    """The error is torch's own; running statistics are as before, and without graphs the task is worth another attempt."""

    def full(module, images, **_):
        module(*images)
        raise error

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", full)
    made = network()
    before = copy.deepcopy(made.state_dict())
    with pytest.raises(RuntimeError, match="out of memory"):
        epoch(made)
    if isinstance(error, torch.OutOfMemoryError):  # CUDA itself works on
        assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())
    assert graphs.leave(made)
    epoch(made)
    assert not graphs.leave(made)


def test_a_gpu_that_computes_no_more_hides_no_remedy(captures, monkeypatch):
    def refused(module, images, **_):
        monkeypatch.setattr(torch.Tensor, "copy_", lambda *_: pytest.fail("CUDA may refuse everything now"))
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", refused)
    made = network()
    with pytest.raises(InputError, match="submit the job without --set cuda_graphs=true"):
        graphs.replayed(made.train(), SHAPE, False)


def test_a_network_that_left_is_captured_no_more(captures):
    made = network()
    assert not graphs.leave(network()), "it had none"
    epoch(made)
    assert graphs.leave(made)
    assert graphs.replayed(made, SHAPE, False) is made
    assert not graphs.leave(made)
    assert captures == [SHAPE]


def test_a_copy_begins_without_graphs(captures):
    """The graphs of the first read and write its own tensors."""
    made = network()
    epoch(made)
    other = copy.deepcopy(made)
    epoch(other)
    assert captures == [SHAPE, SHAPE]
