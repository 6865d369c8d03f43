"""What lean.py leaves out of a process or has imported later: seen in a process that uses it, beside one that does not."""

import gc
import subprocess
import sys
from ast import literal_eval
from functools import cache
from pathlib import Path

import pytest
import torch

import feddp
from feddp.lean import META, PROCESSES, UNUSED, no_search
from feddp.training.seeds import seed_of

LEAN = "from feddp.lean import import_monai; import_monai()"
IMPORTED = f"print(*[name for name in {UNUSED} if name in sys.modules])"
WATCHED = "import gc; searches = []; gc.callbacks.append(lambda phase, info: searches.append(phase))"
SEARCHED = "print(len(searches), gc.isenabled(), gc.get_freeze_count())"
MODULES = "print(*sorted(name for name in sys.modules if name.split('.')[0] == 'monai'))"


def said(*code: str) -> list[str]:
    """The lines that a process of its own prints, which takes seconds: MONAI imports torch."""
    ended = "import os; sys.stdout.flush(); os._exit(0)"  # at once: to take torch and MONAI apart takes seconds more
    command = [sys.executable, "-c", "\n".join(("import sys", *code, ended))]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory):
    """The compiler makes its folder in the machine's temporary one otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("compiler")))
        yield


# what mentions the compiler without compiling anything: libraries, an optimizer, functions that it is to leave alone
MENTIONED = """
gc.callbacks.clear()
import torch, torchvision, timm
layer = torch.nn.Linear(2, 1)
optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
def step():
    optimizer.zero_grad()
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
step()
optimizer.load_state_dict(optimizer.state_dict())
@torch._disable_dynamo
def apart(x):
    return 3 * x
apart(torch.ones(1))
stored = torch._dynamo.graph_break
print(sorted({'torch._dynamo.config', 'torch._inductor', 'torch._refs'} & sys.modules.keys()))
"""
# apart is not in the compiled code, which is in two parts, before and behind it; the optimizer goes on, alone and compiled
COMPILED = """
graphs = []
def backend(graph, inputs):
    graphs.append([node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"])
    return graph
print(torch.compile(lambda x: apart(x + 2) - 1, backend=backend)(torch.ones(1)).item(), graphs)
step()
before = layer.weight.tolist()
torch.compile(step, backend=backend)()
print(before != layer.weight.tolist(), torch._dynamo is sys.modules["torch._dynamo"])
def broken(x):
    x = x + 2
    stored()
    return x - 1
graphs.clear()
torch.compile(broken, backend=backend)(torch.ones(1))
print(graphs)
"""
LOADED = "['torch._dynamo.config', 'torch._inductor', 'torch._refs']"
# a convolution of tensors without values: by torch's own word, and by ours, which leaves the compiler alone; and an export
KERNELS = """
if not os.fork():
    def convolved(device):
        with device:
            return list(torch.nn.Conv2d(3, 5, 3)(torch.zeros(1, 3, 8, 8)).shape)
    try:
        print(convolved(torch.device("meta")))
    except NotImplementedError:
        print("no kernel")
    print(convolved(feddp.lean.meta_device()), convolved(torch.device("meta")))
    print("torch._dynamo.config" in sys.modules, flush=True)
    os._exit(0)
os.wait()
if not os.fork():
    import io
    torch.onnx.export(torch.nn.Conv2d(3, 5, 3), (torch.zeros(1, 3, 8, 8),), written := io.BytesIO(), dynamo=False)
    print(len(written.getvalue()) > 100, flush=True)
    os._exit(0)
os.wait()
"""
ASKED = [
    "found = torch.compiler.disable(torch.nn.Linear(1, 1)).weight",
    "found = roi_align.is_compile_supported('cpu')",
    "import torch._dynamo.config as found",
]
# each in a process of its own, which a fork starts faster than Python
EACH = f"""
import inspect, os
from importlib.util import find_spec
from torchvision.ops import roi_align as _
roi_align = sys.modules["torchvision.ops.roi_align"]
print(find_spec("torch._dynamo").origin.endswith("__init__.py"))
inspect.stack()
inspect.getmodule(lambda: None)
import sympy, torch.distributed.fsdp  # which are not of the compiler, and which each would import with it
print("torch._dynamo.config" in sys.modules, flush=True)
for asked in {ASKED}:
    if os.fork():
        os.wait()
        continue
    gc.disable()  # it ends soon
    exec(asked)
    print(asked, found is not None, "torch._dynamo.config" in sys.modules, flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def usual() -> list[str]:
    return said(WATCHED, "import monai", SEARCHED, IMPORTED, MODULES, MENTIONED)


@pytest.fixture(scope="module")
def lean() -> list[str]:
    others = "import matplotlib, scipy.signal, sklearn"
    again = (
        "alive = [[] for _ in range(100_000)]",
        "before = gc.get_freeze_count()",
        LEAN,
        "print(gc.get_freeze_count() <= before)",
    )
    compiler = (MENTIONED, EACH, KERNELS, COMPILED)
    return said("import feddp.lean", WATCHED, LEAN, SEARCHED, IMPORTED, MODULES, others, IMPORTED, *again, *compiler)


def test_only_monai_misses_them(usual, lean):
    """Others import them as ever afterwards."""
    every = " ".join(UNUSED)
    assert usual[1] == every, "the control"
    assert [lean[1], lean[3]] == ["", every]


def test_all_modules_of_monai_are_there_as_ever(usual, lean):
    assert usual[2] == lean[2] != ""


def test_nothing_is_searched_while_monai_is_imported(usual, lean):
    """And later searches go on without what it made: hundreds of thousands of objects."""
    searches, enabled, left_out = usual[0].split()
    assert int(searches) > 100, "the control"
    assert (enabled, left_out) == ("True", "0")
    searches, enabled, left_out = lean[0].split()
    assert (searches, enabled) == ("0", "True")
    assert int(left_out) > 100_000
    assert lean[4] == "True", "a second call leaves nothing more out"


def test_after_an_import_that_fails_python_searches_again():
    with pytest.raises(ImportError), no_search():
        raise ImportError
    assert gc.isenabled()


def test_a_process_without_the_search_stays_so():
    assert said(
        "import gc; gc.disable()", "from feddp.lean import no_search", "with no_search(): pass", "print(gc.isenabled())"
    ) == ["False"]


def test_the_compiler_is_imported_when_something_compiles_and_compiles_as_ever(usual, lean):
    """3 · (1 + 2) − 1 = 8."""
    parts = [["add"], ["sub"]]
    compiled = [f"8.0 {parts}", "True True", str(parts)]
    assert usual[3:] == [LOADED], "the control"
    assert [lean[5], *lean[-3:]] == ["[]", *compiled]


def test_who_asks_for_more_gets_the_compiler(lean):
    """To look for it, or to ask every module for its file, as torch does for each operator of a library, is not more.

    Only a plain function is left alone without it: what else may be given, it alone knows.
    """
    assert lean[6:-7] == ["True", "False", *(f"{asked} True True" for asked in ASKED)]


def test_on_the_meta_device_all_operations_have_their_kernels_where_we_use_it(lean):
    """A 3 x 3 convolution leaves 6 x 6 of 8 x 8 pixels. Afterwards torch's own word has them too. No compiler is loaded."""
    assert lean[-7:-4] == ["no kernel", "[1, 5, 6, 6] [1, 5, 6, 6]", "False"]


def test_a_network_is_exported_to_onnx_without_them(lean):
    assert lean[-4] == "True"


def test_a_process_without_those_kernels_makes_generators_and_draws_as_ever():
    """torch 2.15 alone makes none there, so every generator of the package is made by the function that takes care of it."""
    draw = "torch.rand(3, generator=generator('a', 1)).tolist()"
    (line,) = said(
        "from feddp.lean import postpone_compiler; postpone_compiler()",
        "import torch",
        "from feddp.training.seeds import generator",
        f"print([{draw}, 'torch._dynamo.config' in sys.modules])",
    )
    wanted = torch.rand(3, generator=torch.Generator().manual_seed(seed_of("a", 1))).tolist()
    assert literal_eval(line) == [wanted, False]
    sources = {path.name: path.read_text(encoding="utf-8") for path in Path(feddp.__file__).parent.rglob("*.py")}
    assert [name for name, source in sources.items() if "torch.Generator(" in source] == ["seeds.py"]


@pytest.mark.parametrize("program", [*sorted(PROCESSES), ""])
def test_in_the_processes_of_a_run_the_first_import_of_feddp_postpones_it(program):
    """A user's own process does not. What processes load is seen in test_simulator.py, test_poc.py and test_workers.py."""
    code = f"import sys, feddp; print('torch' in sys.modules, {META!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", str(bool(program))]


AT_ONCE = "from feddp.lean import end_at_once; end_at_once()"
COMMAND = f"""
sys.argv = ['feddp', 'methods']
from feddp.cli import main
import sklearn
{LEAN}
{IMPORTED}
main()
"""
# Python finds it when the process ends
ITSELF = """
import sys
class Kept:
    def __del__(self):
        print("found")
kept = Kept()
kept.itself = kept
"""


@cache
def ended(code: str) -> list[str]:
    """What a process says that ends by itself, without a complaint."""
    command = [sys.executable, "-c", f"{ITSELF}{code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_what_was_imported_before_stays():
    assert ended(COMMAND)[0] == "sklearn"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("", True),
        (AT_ONCE, False),
        (f"{AT_ONCE}; sys.modules['triton'] = sys", True),
        (COMMAND, False),
        ("import feddp", True),
        *((f"sys.orig_argv.append({program!r}); import feddp", False) for program in sorted(PROCESSES)),
    ],
    ids=["control", "at once", "with triton", "command", "user's own", *sorted(PROCESSES)],
)
def test_a_command_ends_without_a_search_for_what_refers_to_itself(code, found):
    """So does a process of a run, and no user's own. Unless it has loaded triton, which would complain."""
    assert ("found" in ended(code)) == found
