"""What a site is told when its memory is too small, how devices compute, and which site gets which of several."""

import weakref
from types import SimpleNamespace

import pytest
import torch

from feddp import protocol
from feddp.errors import InputError
from feddp.stages import answered, stage_of
from feddp.stages.message import Message
from feddp.training.device import asked_for, dealt, memory_of, settle


def test_a_gpu_s_want_of_memory_names_the_site_and_what_to_lower():
    text = "CUDA out of memory. Tried to allocate 20.00 MiB.\nGPU 0 has a total capacity of ..."
    with pytest.raises(InputError) as raised, memory_of("A"):
        raise torch.OutOfMemoryError(text)
    assert str(raised.value) == (
        "site A: its GPU has too little memory (CUDA out of memory. Tried to allocate 20.00 MiB.); submit the job with a"
        " smaller --set batch, --size or --network, or let fewer sites share the GPU"
    )


def test_a_machine_s_want_of_memory_does_too():
    """torch's own error for 2^62 numbers, which no machine has room for."""
    with pytest.raises(InputError, match="site A: its machine has too little memory .*--size or --network$"), memory_of("A"):
        torch.empty(2**60, dtype=torch.float32)


@pytest.mark.parametrize(("error", "said"), [(MemoryError(), "MemoryError"), (MemoryError("Unable to allocate 9"), "Unable")])
def test_what_python_and_numpy_do_not_get_is_said_too(error, said):
    with pytest.raises(InputError, match=f"site A: its machine has too little memory .{said}"), memory_of("A"):
        raise error


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in CUDA's documentation",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    ],
)
@pytest.mark.parametrize("kind", [RuntimeError, torch.cuda.AcceleratorError])
def test_a_gpu_that_other_processes_fill_is_full_too(monkeypatch, kind, text):
    """What torch's allocator does not allocate fails without its type: the context, and the libraries' own memory."""

    def broken(*_, **__):
        raise kind(text)

    first = text.splitlines()[0]
    with pytest.raises(InputError) as raised, memory_of("A"):
        broken()
    assert str(raised.value).startswith(f"site A: its GPU has too little memory ({first}); submit the job with a smaller")
    monkeypatch.setattr(torch, "empty", broken)
    with pytest.raises(InputError) as raised:
        asked_for("cuda")
    assert str(raised.value) == f"--device cuda cannot be used ({first}); let fewer processes share the GPU"


@pytest.mark.parametrize("chained", [False, True])
def test_what_the_failed_step_held_is_free_when_the_cache_is_emptied(monkeypatch, chained):
    """The error's traceback holds the step's variables, or that of the error which caused it: the GPU's cache would keep their
    memory from other processes."""
    held, left = [], []
    full = torch.OutOfMemoryError("CUDA out of memory.")

    def step():
        activation = torch.zeros(2)
        held.append(weakref.ref(activation))
        raise ValueError("no buffer") if chained else full

    def whole():
        try:
            step()
        except ValueError:
            raise full  # noqa: B904

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: left.append(held[0]()))
    with pytest.raises(InputError), memory_of("A"):
        whole()
    assert left == [None]


def test_errors_that_name_each_other_come_to_an_end():
    """As where one error object is raised again while an error that it caused is handled."""
    full, other = torch.OutOfMemoryError("CUDA out of memory."), ValueError("no buffer")
    full.__cause__, other.__cause__ = other, full
    with pytest.raises(InputError, match="its GPU"), memory_of("A"):
        raise full


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ValueError("can't allocate memory")])
def test_other_errors_pass(error):
    with pytest.raises(type(error), match=str(error)), memory_of("A"):
        raise error


@pytest.mark.parametrize("task", [protocol.TRAIN, protocol.CALIBRATE, protocol.EVALUATE])
@pytest.mark.parametrize(
    ("error", "what"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), "GPU"),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried ..."),
            "machine",
        ),
    ],
)
def test_a_stage_whose_answer_lacks_memory_says_so(monkeypatch, plan_for, task, error, what):
    def answer(task, message, host):
        raise error

    monkeypatch.setattr(stage_of(protocol.spec_of(task).stage), "answer", answer)
    host = SimpleNamespace(name="A", plan=plan_for(), request=None, consents=lambda word: True, release=list)
    with pytest.raises(
        InputError, match=f"^site A: its {what} has too little memory .* smaller --set batch, --size or --network"
    ):
        answered(task, Message(), host)


@pytest.mark.parametrize("task", [protocol.INTRODUCE, protocol.COLLECT])
def test_a_site_that_lacks_memory_when_it_is_opened_says_so_too(plan_for, task):
    def opened():
        raise torch.OutOfMemoryError("CUDA out of memory.")

    host = SimpleNamespace(name="A", plan=plan_for(), request=None, consents=lambda word: True, open=opened, release=list)
    with pytest.raises(InputError, match="^site A: its GPU has too little memory"):
        answered(task, Message(), host)


FULL, SMALL = torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("can't allocate memory")


@pytest.mark.parametrize(("error", "held", "asked"), [(FULL, True, 2), (FULL, False, 1), (SMALL, True, 1)])
def test_a_task_is_repeated_once_where_images_left_a_full_gpu(monkeypatch, plan_for, error, held, asked):
    """Not where none lay there, nor where the machine's own memory is full: nothing would be different then."""
    tasks: list[str] = []

    def fails(task, message, host):
        tasks.append(task)
        raise error

    monkeypatch.setattr(stage_of("train"), "answer", fails)
    host = SimpleNamespace(name="A", plan=plan_for(), request=None, consents=lambda word: True, release=lambda: held)
    with pytest.raises(InputError, match="^site A: its (GPU|machine) has too little memory"):
        answered(protocol.TRAIN, Message(), host)
    assert tasks == [protocol.TRAIN] * asked


@pytest.fixture
def tf32():
    """Both places in which torch keeps whether float32 may become TF32, which it may during the test.

    Not by monkeypatch: they are no attributes that could be deleted.
    """
    places = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [place.allow_tf32 for place in places]
    for place in places:
        place.allow_tf32 = True
    yield places
    for place, value in zip(places, before, strict=True):
        place.allow_tf32 = value


@pytest.mark.parametrize("ask", [lambda: asked_for("cpu"), lambda: dealt("cpu", ["A"]), lambda: settle("cuda", 1)])
def test_every_way_to_a_device_leaves_float32_as_it_is(tf32, ask):
    """A command such as `feddp predict` never settles a process: it only asks for its device."""
    ask()
    assert not any(place.allow_tf32 for place in tf32)


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        ("cpu", ["cpu", "cpu", "cpu"]),
        ("cpu,cpu:0", ["cpu", "cpu:0", "cpu"]),
        ("cpu:0, cpu", ["cpu:0", "cpu", "cpu:0"]),
        ("cpu,cpu,cpu:0,cpu:0", ["cpu", "cpu", "cpu:0"]),
    ],
)
def test_devices_are_dealt_to_the_sites_in_turn(names, wanted):
    """Site i gets device i modulo their number: of two, sites 0 and 2 the first; of four, the last gets none of three sites."""
    assert dealt(names, ["B", "A", "C"]) == dict(zip("BAC", wanted, strict=True))


@pytest.mark.parametrize(("names", "wrong"), [("cpu,cuda:99", "cuda:99"), ("cuda:99,cpu", "cuda:99")])
def test_each_of_several_devices_must_be_there(names, wrong):
    with pytest.raises(InputError, match=rf"^--device {wrong} cannot be used \(.*\); say cpu, cuda or cuda:N$"):
        dealt(names, ["A"])


@pytest.mark.parametrize(
    ("names", "wrong"), [("cpu,,cpu", "a name is empty"), ("", "a name is empty"), ("cpu,meta", "name GPUs alone")]
)
def test_empty_names_and_mixed_devices_are_refused(names, wrong):
    with pytest.raises(InputError, match=rf"^--device {names}: {wrong}"):
        dealt(names, ["A"])
