"""Commands on files whose names, or what they hold, command a terminal: nothing of it reaches the terminal."""

import shutil

import pytest
from PIL import Image

from feddp.data.synthesize import synthesize
from feddp.files import append_event, write_json
from feddp.run.session import Request, record
from support.report_runs import save_toy, toy_run

EVIL = "\x1b]0;owned\x07\x9b31m\x1b[2J\u202egpj"
OBEYED = ("\x1b", "\x07", "\x9b", "\u202e")


@pytest.fixture
def hostile(toy, tmp_path, tiny_root, plan_for):
    """Folders of a data provider, of a site, of a run and of a kit, with such names."""
    pictures = tmp_path / f"pictures{EVIL}"
    for name in ("good", f"bad{EVIL}"):
        (pictures / "images").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 40), (10, 200, 30)).save(pictures / f"images/{name}.png")
    (pictures / f"images/broken{EVIL}.png").write_bytes(b"no picture")
    shutil.copytree(tiny_root, tmp_path / "sites")
    table = tmp_path / "sites/site-1/split.csv"
    table.write_text(table.read_text().replace(",train", f"{EVIL},train", 1))
    Image.new("RGB", (4, 4)).save(tmp_path / f"sites/site-1/images/more{EVIL}.png")
    synthesize(tmp_path / "data", sites=1, images=8, size=32)
    (tmp_path / "data/site-1").rename(tmp_path / f"data/site{EVIL}")
    save_toy(tmp_path / "network.safetensors", toy, 0)
    run, policies = tmp_path / f"run{EVIL}", {site: {"data": str(tiny_root / site)} for site in ("site-1", "site-2")}
    run.mkdir()
    request = Request(plan_for(network=toy, method="fedavg"), policies, run, env="local")
    write_json(run / "run.json", record(request) | {"job": "local"})
    server = run / "workspace/server/feddp/local"
    server.mkdir(parents=True)
    append_event(server / "progress.jsonl", "ask", task="train", sites=["site-1"], round=1, phase=0, bytes={"site-1": 5})
    append_event(server / "progress.jsonl", "refused", site="site-1", task="train", reason=f"site site-1: {EVIL} [red]")
    damaged = tmp_path / f"runs/damaged{EVIL}"
    damaged.mkdir(parents=True)
    (damaged / "run.json").write_text('{"env": ')
    kit = tmp_path / f"kit{EVIL}"
    for part in ("startup", "local"):
        (kit / part).mkdir(parents=True)
    (kit / "startup/fed_client.json").write_text("{}")
    (tmp_path / "job").mkdir()
    toy_run(tmp_path / "finished", toy)
    return tmp_path


COMMANDS = {
    "prepare": ("data", "prepare", "folder", "--source", f"pictures{EVIL}", "--out", "prepared"),
    "check": ("data", "check", "sites"),
    "predict": ("predict", "--network", "network.safetensors", "--images", f"pictures{EVIL}/images", "--out", f"masks{EVIL}"),
    "run": ("run", "--data", "data", "--out", "out", "--env", "local", "--size", 32),
    "report": ("report", f"run{EVIL}", "--out", "report.html"),
    "pages": ("report", "finished", "--out", f"page{EVIL}.html"),
    "watch": ("watch", f"run{EVIL}"),
    "runs": ("runs", "list", "runs"),
    "kit check": ("kit", "check", f"kit{EVIL}"),
    "kit start": ("kit", "start", f"kit{EVIL}"),
    "kit approve": ("kit", "approve", "job", f"kit{EVIL}"),
    "export": ("export", "--network", f"n{EVIL}.safetensors", "--to", "card", "--out", "card"),
    "models": ("models", "deploy", f"n{EVIL}.safetensors"),
    "config": ("run", "--config", f"c{EVIL}.yaml"),
    "compare": ("compare", "--data", "data", "--out", f"compared{EVIL}", "--methods", f"fed{EVIL}avg"),
    "bench": ("bench", f"round{EVIL}"),
}


def test_no_command_gives_a_terminal_commands(hostile, feddp, monkeypatch):
    monkeypatch.chdir(hostile)
    shown = {}
    for name, words in COMMANDS.items():
        _, out, err = feddp(*words)
        shown[name] = out + err
    assert [name for name, text in shown.items() if "owned" not in text] == [], "the control: each shows it"
    assert {name: text for name, text in shown.items() if any(sign in text for sign in OBEYED)} == {}
