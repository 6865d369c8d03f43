"""Networks' files and finished runs from somebody who means harm: refused before anything is built or read for their sake."""

import json
import pickle
import shutil
import zipfile

import pytest
import torch
from PIL import Image

from feddp.data.synthesize import synthesize
from feddp.errors import FedDPError
from feddp.limits import CHANNELS, NETWORK_BYTES, PICKLE_BYTES, SIZE
from feddp.networks import LAYERS, build
from feddp.networks.header import outline
from feddp.networks.metadata import Metadata
from feddp.networks.weights import load_checkpoint, load_personal, read_network, save_network
from feddp.plan.resolve import build_network
from feddp.stages.results import gathered
from feddp.training.columns import METRICS
from feddp.training.store import Store
from support.hostile_files import MIB, costs, one_line, png, safetensors, sparse

REQUIRED = {"network": "toy", "channels": "3", "classes": '["lesion"]', "labels": "nested", "size": "32", "method": "feddp"}
HUGE = '{"local_calibration": {"sites": 1000}}'


@pytest.fixture
def file(toy, tmp_path):
    """Writes a toy network's file, with other metadata if wanted."""

    def make(**changes):
        said = {name: value for name, value in (REQUIRED | changes).items() if value is not None}
        save_network(tmp_path / "network.safetensors", build(toy, 3, 1, seed=0).state_dict(), said)
        return tmp_path / "network.safetensors"

    return make


@pytest.fixture
def pngs(tmp_path):
    (tmp_path / "images").mkdir()
    Image.new("RGB", (40, 30), (10, 200, 30)).save(tmp_path / "images/a.png")
    return tmp_path / "images"


@pytest.fixture
def run(file, toy, tmp_path, plan_for):
    """The folder of a finished run of two sites with the toy network."""
    plan = plan_for(method="fedavg", network=toy)
    for site in plan.sites:
        (tmp_path / "run/sites" / site).mkdir(parents=True)
        shutil.copy(file(method="fedavg"), tmp_path / "run/sites" / site / "network.safetensors")
    save_network(tmp_path / "run/shared.safetensors", build_network(plan).state_dict(), {"round": "1"})
    cell = {"mean": 0.5, "std": 0.0, "n": 2}
    summary = {when: dict.fromkeys(METRICS, cell) for when in ("before_calibration", "final")}
    (tmp_path / "run/results.json").write_text(json.dumps(gathered(plan, dict.fromkeys(plan.sites, summary), 1, 1)))
    return tmp_path / "run"


BAD = {
    "size": ({"size": "1000000000"}, f"size='1000000000', not 32 to {SIZE} in steps of 32"),
    "size between": ({"size": "33"}, "not 32 to"),
    "size of many digits": ({"size": "9" * 5000}, "not 32 to"),
    "size with an underscore": ({"size": "3_2"}, "not 32 to"),
    "no size": ({"size": None}, "its metadata lacks size"),
    "channels below": ({"channels": "-1"}, f"channels='-1', not 1 to {CHANNELS}"),
    "channels above": ({"channels": "1000000000"}, f"not 1 to {CHANNELS}"),
    "channels as words": ({"channels": "٣"}, f"not 1 to {CHANNELS}"),
    "a million classes": (
        {"classes": json.dumps([str(i) for i in range(10**6)])},
        "its header has .* bytes; the limit is 1 MiB",
    ),
    "many classes": ({"classes": json.dumps([str(i) for i in range(10**4)])}, "10000 classes, not 1 to 255"),
    "no class": ({"classes": "[]"}, "0 classes"),
    "classes that are none": ({"classes": "[[1]]"}, "1 classes, not"),
    "classes that cannot be printed": ({"classes": '["\\ud800"]'}, "1 classes, not"),
    "classes without end": ({"classes": "[" * 10**5}, "not a network that feddp saved"),
    "network": ({"network": "x" * 10**4}, "unknown network 'xxx"),
    "method": ({"method": "magic"}, "unknown method 'magic'"),
    "labels": ({"labels": "some"}, "unknown labels 'some'"),
    "selection": ({"selection": "train"}, "unknown selection 'train'; it is one of val, test"),
    "layers that are none": ({"layers": "[]"}, "not names with their options"),
    "layers unknown": ({"layers": '{"os": {}}'}, "unknown layers 'os'"),
    "an option too large": ({"layers": '{"local_calibration": {"sites": 1e18}}'}, "not a number from 0 to"),
    "an option below": ({"layers": '{"virtual_classes": {"virtual": -1}}'}, "not a number from 0 to"),
    "an option of no number": ({"layers": '{"local_calibration": {"sites": [1]}}'}, "not a number from 0 to"),
    "an option without an end": ({"layers": '{"virtual_classes": {"temperature": NaN}}'}, "not a number from 0 to"),
    "an option of 400 digits": ({"layers": f'{{"lora": {{"rank": 1{"0" * 400}}}}}'}, "not a number from 0 to"),
    "an option unknown": ({"layers": '{"projector": {"x": 1}}'}, "cannot be built"),
    "an option that is no count": ({"layers": '{"virtual_classes": {"virtual": 0.5}}'}, "cannot be built"),
    "an unlikely sum of it all": (
        {"classes": json.dumps([str(i) for i in range(255)]), "layers": HUGE},
        "no encoder|does not fit",
    ),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
def test_predict_refuses_a_network_whose_metadata_are_out_of_bounds(feddp, file, pngs, tmp_path, changes, message):
    network = file(**changes)
    error = one_line(*feddp("predict", "--network", network, "--images", pngs, "--out", tmp_path / "out")[::2])
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(error)
    assert len(error) < 1500
    assert not (tmp_path / "out").exists()


def test_a_file_of_an_earlier_version_does_not_say_which_split_selected(file, plan_for, toy):
    """It is a network of the run around it all the same (`feddp export --to card`), whose plan says it."""
    earlier, now = (Metadata.of(file(), REQUIRED | texts) for texts in ({}, {"selection": "test"}))
    assert (earlier.selection, now.selection) == ("", "test")
    assert earlier == now
    assert Metadata.of(file(), plan_for(network=toy, selection="test").metadata).selection == "test"


def test_predict_takes_the_network_as_a_run_leaves_it(feddp, file, pngs, tmp_path):
    code, _, err = feddp("predict", "--network", file(), "--images", pngs, "--out", tmp_path / "out")
    assert code == 0, err
    assert (tmp_path / "out/a.png").exists()


def test_the_bounds_let_through_what_is_at_their_edge(tmp_path):
    edge = REQUIRED | {"network": "unet", "size": str(SIZE), "channels": str(CHANNELS)}
    edge |= {"classes": json.dumps([str(i) for i in range(255)]), "layers": '{"virtual_classes": {"virtual": 100000}}'}
    said = Metadata.of(tmp_path, edge)
    assert (said.size, said.channels, len(said.classes)) == (SIZE, CHANNELS, 255)


OPTIONS = {
    "local_calibration": {"sites": 2},
    "lora": {"rank": 4},
    "personal_head": {},
    "projector": {},
    "rotation": {},
    "spatial_adapter": {},
    "virtual_classes": {"virtual": 4, "temperature": 0.1, "nested": True, "paa": True},
}


@pytest.mark.parametrize(
    ("network", "layers"),
    [
        (network, layers)
        for network in ("unet", "pvt", "resnet")
        for layers in LAYERS
        if layers != "lora" or network.startswith("pvt")  # the others have no attention
    ],
)
@pytest.mark.usefixtures("pvt", "resnet")
def test_the_outline_of_a_network_is_the_network_s(network, layers, tmp_path):
    said = Metadata.of(tmp_path, REQUIRED | {"network": network, "layers": json.dumps({layers: OPTIONS[layers]})})
    random = torch.get_rng_state()
    found, built = said.outline(), said.build().state_dict()
    assert [(n, v.shape, v.dtype) for n, v in found.items()] == [(n, v.shape, v.dtype) for n, v in built.items()]
    assert all(value.is_meta for value in found.values())
    assert torch.equal(torch.get_rng_state(), random)


def test_metadata_that_ask_for_gibibytes_cost_nothing_to_a_file_that_does_not_hold_them(tmp_path):
    """255 classes on an FPN: FedLC's last convolution has 2 · 255 · 128 · 255 · 9 weights, 571 MiB, which `build` makes."""
    said = REQUIRED | {"network": "resnet18-fpn", "classes": json.dumps([str(i) for i in range(255)]), "layers": HUGE}
    save_network(tmp_path / "n.safetensors", {"x": torch.zeros(1)}, said)
    path = f"Path({str(tmp_path / 'n.safetensors')!r})"
    # the libraries behind a network are imported when one is first built
    first = "from feddp.networks import build; build('resnet18-fpn', 3, 1, seed=0)"
    setup = f"from feddp.networks.weights import load_personal, outline, Metadata; {first}"
    reads = f"load_personal({path})", f"Metadata.of({path}, outline({path})[1]).build()"
    (error, grown), (_, control) = costs(setup, *reads)
    assert "does not fit the network" in error
    assert grown < 200
    assert control > 571


# -- safetensors -------------------------------------------------------------------------------------------------------

LONG = {"x": {"dtype": "F32", "shape": [1] * 9, "data_offsets": [0, 4]}}
HEADERS = {
    "a header as long as a file system": b"\xff" * 8,
    "a header of 300 MiB": (300 * MIB).to_bytes(8, "little"),
    "nested": safetensors(b"[" * 100_000),
    "a list": safetensors([1, 2]),
    "metadata that are no text": safetensors({"__metadata__": {"a": 1}}),
    "metadata that are none": safetensors({"__metadata__": [1]}),
    "a tensor that is none": safetensors({"x": 1}),
    "an unknown type": safetensors({"x": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}, b"0000"),
    "a type that is none": safetensors({"x": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, b"0000"),
    "dimensions": safetensors(LONG, b"0000"),
    "a length below": safetensors({"x": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}, b"0000"),
    "more values than bytes": safetensors({"x": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4]}}, b"0000"),
    "a product that overflows": safetensors({"x": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 4]}}, b"0000"),
    "offsets beyond": safetensors({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"0000"),
    "no offsets": safetensors({"x": {"dtype": "F32", "shape": [1]}}, b"0000"),
}


@pytest.mark.parametrize("content", HEADERS.values(), ids=HEADERS)
def test_a_header_that_makes_no_tensors_is_named(tmp_path, content):
    (tmp_path / "n.safetensors").write_bytes(content)
    with pytest.raises(FedDPError, match="n.safetensors: cannot be read as tensors"):
        read_network(tmp_path / "n.safetensors")


def test_a_file_larger_than_any_network_is_not_read_and_what_a_site_keeps_of_its_peers_may_be(tmp_path):
    """A header that fills its file: 1.5 GiB of one tensor, of which `outline` reads nothing."""
    many = 384 * MIB
    header = safetensors({"a/x": {"dtype": "F32", "shape": [many], "data_offsets": [0, 4 * many]}})
    sparse(tmp_path / "peers.safetensors", len(header) + 4 * many, header)
    with pytest.raises(FedDPError, match=r"peers.safetensors: has \d+ bytes; the limit is 1024 MiB"):
        read_network(tmp_path / "peers.safetensors")
    assert outline(tmp_path / "peers.safetensors", 64 * NETWORK_BYTES)[0] == {"a/x": (many,)}
    (tmp_path / "peers.safetensors").unlink()
    Store(tmp_path).write("peers", {"a/x": torch.ones(3)})
    assert Store(tmp_path).read("peers")[0]["a/x"].tolist() == [1, 1, 1]


def test_many_small_tensors_are_bounded_by_the_header(tmp_path):
    """20,000 tensors take 1.1 MiB to name."""
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    (tmp_path / "n.safetensors").write_bytes(safetensors({f"tensor{i}": entry for i in range(20_000)}))
    with pytest.raises(FedDPError, match="cannot be read as tensors .its header has .* bytes; the limit is 1 MiB"):
        outline(tmp_path / "n.safetensors")


# -- PyTorch's own files -------------------------------------------------------------------------------------------------


def repacked(path, method, replace=lambda name, content: content):
    with zipfile.ZipFile(path) as source:
        parts = {name: source.read(name) for name in source.namelist()}
    with zipfile.ZipFile(path, "w", method) as target:
        for name, content in parts.items():
            target.writestr(name, replace(name, content))


def test_a_checkpoint_that_unpacks_to_more_than_it_is_is_refused(tmp_path):
    """160 MB of zeros in 160 kB: PyTorch reads them all, as the control shows."""
    torch.save({"x": torch.zeros(40_000_000)}, tmp_path / "c.pth")
    repacked(tmp_path / "c.pth", zipfile.ZIP_DEFLATED)
    assert (tmp_path / "c.pth").stat().st_size < MIB
    setup = "import torch; from feddp.networks.weights import load_checkpoint, _read"
    path = repr(str(tmp_path / "c.pth"))
    (error, grown), (_, control) = costs(setup, f"_read(Path({path}))", f"torch.load({path}, weights_only=True)")
    assert "c.pth has " in error
    assert "PyTorch does not write" in error
    assert grown < 60
    assert control > 120


def test_a_checkpoint_of_names_without_end_is_refused_and_a_plain_one_is_not(toy, tmp_path):
    network = build(toy, 3, 1, seed=0)
    torch.save(network.state_dict(), tmp_path / "c.pth")
    load_checkpoint(build(toy, 3, 1, seed=1), tmp_path / "c.pth")
    names = pickle.dumps(dict.fromkeys(range(PICKLE_BYTES // 4)), protocol=2)
    repacked(tmp_path / "c.pth", zipfile.ZIP_STORED, lambda name, content: names if name.endswith(".pkl") else content)
    with pytest.raises(FedDPError, match=r"c.pth has .*data.pkl with \d+ bytes"):
        load_checkpoint(network, tmp_path / "c.pth")


def test_a_checkpoint_larger_than_any_network_is_not_read(toy, tmp_path):
    sparse(tmp_path / "c.pth", NETWORK_BYTES + 1)
    with pytest.raises(FedDPError, match=r"c.pth: has \d+ bytes; the limit is 1024 MiB"):
        load_checkpoint(build(toy, 3, 1, seed=0), tmp_path / "c.pth")


# -- finished runs -------------------------------------------------------------------------------------------------------


def adapt(feddp, run, pngs, tmp_path):
    return feddp("adapt", "--models", run, "--images", pngs, "--out", tmp_path / "out", "--how", "global")


def test_adapt_refuses_a_run_one_of_whose_networks_is_out_of_bounds(feddp, run, pngs, tmp_path):
    assert adapt(feddp, run, pngs, tmp_path)[0] == 0
    shutil.rmtree(tmp_path / "out")
    network = run / "sites/site-2/network.safetensors"
    state, said = read_network(network)
    for changes, message in (({"size": "1000000000"}, "size='1000000000'"), ({"channels": "-1"}, "channels='-1'")):
        save_network(network, state, said | changes)
        assert message in one_line(*adapt(feddp, run, pngs, tmp_path)[::2])
    assert not (tmp_path / "out").exists()


RESULTS = {
    "nested": (lambda r: "[" * 100_000, "is not a finished run"),
    "a list": (lambda r: [1], "has no sites with valid folder names"),
    "no site": (lambda r: r | {"sites": {}}, "has no sites with valid folder names"),
    "sites as a list": (lambda r: r | {"sites": ["site-1"]}, "has no sites with valid folder names"),
    "a site elsewhere": (lambda r: r | {"sites": {"../../sites/site-1": {}}}, "has no sites with valid folder names"),
    "sites without end": (lambda r: r | {"sites": {str(i): {} for i in range(1001)}}, "has no sites with valid folder names"),
    "missing": (lambda r: r | {"missing": 5}, "missing must be"),
    "a round": (lambda r: r | {"start_round": "../x"}, "is not a number"),
}


@pytest.mark.parametrize("command", ["adapt", "join", "features", "job-outside"])
@pytest.mark.parametrize(("change", "message"), RESULTS.values(), ids=RESULTS)
def test_results_that_are_none_are_one_line(feddp, run, pngs, tiny_root, tmp_path, command, change, message):
    changed = change(json.loads((run / "results.json").read_text()))
    (run / "results.json").write_text(changed if isinstance(changed, str) else json.dumps(changed))
    more = {
        "adapt": ["--models", run, "--images", pngs],
        "join": ["--models", run, "--data", tiny_root / "site-1"],
        "features": ["--models", run, "--data", tiny_root],
        "job-outside": ["--run", run, "--newcomer", "C"],
    }[command]
    assert message in one_line(*feddp(command, *more, "--out", tmp_path / "out")[::2])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 10**9 - 10**9 % 32}, "size="),
        ({"channels": 10**9}, "channels="),
        ({"classes": [str(i) for i in range(1000)]}, "classes"),
        ({"labels": "some"}, "labels"),
        ({"start_round": 10**9}, "does not say which rounds"),
        ({"start_round": None}, "does not say which rounds"),
    ],
    ids=str,
)
def test_join_refuses_a_run_whose_plan_is_out_of_bounds(feddp, run, tiny_root, tmp_path, changes, message):
    results = json.loads((run / "results.json").read_text())
    (run / "results.json").write_text(json.dumps(results | changes))
    error = one_line(*feddp("join", "--models", run, "--data", tiny_root / "site-1", "--out", tmp_path / "out")[::2])
    assert message in error
    assert len(error) < 1000
    assert not (tmp_path / "out").exists()


def test_join_refuses_shared_tensors_that_are_not_the_network_s(feddp, run, tiny_root, tmp_path):
    arguments = ("join", "--models", run, "--data", tiny_root / "site-1", "--out", tmp_path / "out", "--epochs", 1)
    shared, said = read_network(run / "shared.safetensors")
    for wrong in (shared | {"q.bias": torch.zeros(5)}, shared | {"q.bias": torch.full((4,), torch.nan)}):
        save_network(run / "shared.safetensors", wrong, said)
        assert "q.bias" in one_line(*feddp(*arguments, "--train", "head")[::2])
    assert not (tmp_path / "out").exists()
    save_network(run / "shared.safetensors", shared, said)
    code, _, err = feddp(*arguments, "--train", "head")
    assert code == 0, err


# -- links and names, in every command -----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["adapt", "join", "features", "predict"])
def test_an_image_that_is_a_link_out_of_its_folder_is_refused(feddp, run, file, tmp_path, command):
    synthesize(tmp_path / "data", sites=2, images=6, size=32)
    images = tmp_path / "data/site-1/images"
    for image in images.iterdir():
        elsewhere = image.rename(tmp_path / f"elsewhere-{image.name}")
        image.symlink_to(elsewhere)
    more = {
        "adapt": ["--models", run, "--images", tmp_path / "data/site-1"],
        "join": ["--models", run, "--data", tmp_path / "data/site-1", "--train", "head"],
        "features": ["--models", run, "--data", tmp_path / "data"],
        "predict": ["--network", file(), "--images", images],
    }[command]
    error = one_line(*feddp(command, *more, "--out", tmp_path / "out")[::2])
    assert f"{images}/image-" in error
    assert "is a link that leads out of" in error


@pytest.mark.parametrize("command", ["adapt", "join", "features", "predict", "job-outside"])
def test_loops_of_links_and_names_that_are_too_long_are_one_line(feddp, run, file, pngs, tiny_root, tmp_path, command):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    more = {
        "adapt": ["--images", pngs, "--models"],
        "join": ["--data", tiny_root / "site-1", "--models"],
        "features": ["--data", tiny_root, "--models"],
        "predict": ["--images", pngs, "--network"],
        "job-outside": ["--newcomer", "C", "--run"],
    }[command]
    for place in (tmp_path / "loop", tmp_path / "loop/run", tmp_path / ("x" * 300)):
        one_line(*feddp(command, *more, place, "--out", tmp_path / "out")[::2])
        if command in ("adapt", "predict"):  # the images too
            one_line(*feddp(command, more[-1], file() if command == "predict" else run, more[0], place, "--out", "o")[::2])


def test_a_picture_too_large_is_one_line_of_predict_and_the_others_are_done(feddp, file, pngs, tmp_path):
    (pngs / "b.png").write_bytes(png(13_000, 13_000, b""))
    code, _, error = feddp("predict", "--network", file(channels="3"), "--images", pngs, "--out", tmp_path / "out")
    assert (code, len(error.strip().splitlines())) == (1, 1)
    assert f"{pngs / 'b.png'}: " in error
    assert [mask.name for mask in (tmp_path / "out").iterdir()] == ["a.png"]


def test_load_personal_takes_the_file_whose_shapes_it_has_read(file, toy):
    network = build(toy, 3, 1, seed=0)
    assert all(value.equal(network.state_dict()[name]) for name, value in load_personal(file()).state_dict().items())
