"""The documentation: it builds without a warning and without a network, and names what there is."""

import ast
import re
import socket
import sys
from pathlib import Path

import pytest
import typer
from click.testing import CliRunner
from mkdocs.__main__ import cli as mkdocs

from feddp import limits
from feddp.adaptation.strategies import STRATEGIES
from feddp.cli import app
from feddp.compare.studies import OUTSIDE, STUDIES, TABLE_II
from feddp.data.prepare import FOLDER, PREPARE
from feddp.data.prepare.endopolyp import LAYOUTS
from feddp.methods import OWN
from feddp.networks import NETWORKS
from feddp.plan.schema import Plan
from feddp.protocol import CONSENTS, SCALARS, TASKS
from feddp.provision import MINIMUM
from support.docs_pages import DOCS, PAGES, ROOT, blocks, blocks_for, text_of

pytestmark = pytest.mark.tools

FETCHED = re.compile(r'<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)="(?:https?:)?//[^"]*"|url\(\s*["\']?https?://')
PAPER_NUMBER = re.compile(r"(?<![.\d])00[1-4]\b(?![-.]\d)")
ALL = "\n".join(map(text_of, PAGES))
COMMANDS = typer.main.get_command(app).commands


def refuse(*_):
    raise OSError("offline")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """`mkdocs build --strict`, the README's command, where there is no network: a warning ends it. In this process, which has
    imported the package."""
    (command,) = [block.text for block in blocks_for("test_docs", "README.md")]
    program, *words = command.split()
    assert program == "mkdocs"
    out = tmp_path_factory.mktemp("docs") / "site"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(sys, "path", [*sys.path])
        done = CliRunner().invoke(mkdocs, [*words, "--site-dir", str(out)])
    assert done.exit_code == 0, done.output[-3000:]
    assert "Documentation built in" in done.output, "the control: what it logs is seen"
    assert "WARNING" not in done.output
    return out


def built(site: Path, page: str) -> str:
    return (site / page).with_suffix(".html").read_text(encoding="utf-8")


def test_it_fetches_nothing_from_elsewhere(site):
    """No script, style, font or picture of another host. Links that a reader follows may lead there."""
    pages = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert len(pages) > 25
    assert [path for path in pages if FETCHED.search(path.read_text(encoding="utf-8"))] == []
    assert FETCHED.search('<link href="https://fonts.gstatic.com" rel="preconnect">'), "the control"
    assert 'class="mermaid"' not in "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.html")), "loads a script"


def test_every_page_is_in_the_navigation_and_has_one_title():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for path in DOCS.rglob("*.md"):
        assert f"{path.relative_to(DOCS)}\n" in navigation, path
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
        assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1, page


def test_every_figure_of_the_results_is_shown():
    shown = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "results").rglob("*.md"))
    figures = list((DOCS / "results").rglob("*.png"))
    assert len(figures) >= 4
    assert [path.name for path in figures if f"]({path.parent.name}/{path.name})" not in shown] == []


def test_no_built_page_cites_a_paper_by_number(site):
    """The generated pages take their words from the package."""
    pages = [path for path in site.rglob("*.html") if path.name != "tables.html"]
    text = {path.name: re.sub(r"<[^>]+>", " ", path.read_text(encoding="utf-8")) for path in pages}
    assert [name for name, found in text.items() if PAPER_NUMBER.search(found)] == []


# --- what the generated pages hold ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OWN)
def test_every_method_has_a_section_with_its_deviations_and_settings(site, name):
    text = built(site, "reference/methods")
    _, found, section = text.partition(f'<h2 id="{name}">')
    assert found
    assert "Deviations:" in section.split("<h2")[0]
    for setting in Plan.known_settings(name).keys() - Plan.known_settings("fedavg").keys():
        assert f"<code>{setting}</code>" in text, setting


def test_every_setting_of_all_methods_is_listed(site):
    text = built(site, "reference/settings")
    for method in OWN:
        for name in Plan.known_settings(method):
            assert f"<code>{name}</code>" in text, name
    assert all(f"<code>{name}</code>" in text for name in NETWORKS)


def test_every_task_and_every_scalar_is_listed(site):
    text = built(site, "reference/tasks")
    assert [name for name in (*TASKS, *SCALARS) if f"<code>{name}</code>" not in text] == []


def test_every_public_set_has_its_layout(site):
    text = built(site, "reference/files")
    assert [name for name in PREPARE if name != FOLDER and f'<h3 id="{name}">' not in text] == []
    folders = [layout.images.split("/")[0] for layout in LAYOUTS]
    folders += ["kaggle_3m", "Drishti-GS1_files", "RIGA-mask", "ISBI_1.5", "cxr"]
    assert [name for name in folders if name not in text] == []


def test_the_consortiums_minimum_is_listed(site):
    text = built(site, "reference/policy")
    assert [name for name in MINIMUM if f"<code>{name}</code>" not in text] == []


def test_every_limit_says_of_what_it_is(site):
    shown = built(site, "reference/files")
    assert all(f"<code>{name}</code>" in shown for name in vars(limits) if name.isupper() and name != "MIB")


def test_every_command_and_every_option_is_listed(site):
    text = built(site, "reference/cli")
    for name, command in COMMANDS.items():
        for word, each in getattr(command, "commands", {"": command}).items():
            assert f">{f'feddp {name} {word}'.strip()}<" in text
            options = [option for p in each.params if p.name != "help" for option in p.opts if option.startswith("--")]
            assert [option for option in options if f"<code>{option}</code>" not in text] == []


# --- what is named is there, and what is there is named ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("docs/how-to/compare.md", [*STUDIES, *(name for name in OUTSIDE if name != TABLE_II)]),
        ("docs/how-to/adapt.md", STRATEGIES),
        ("docs/reference/policy.md", CONSENTS),
    ],
)
def test_what_an_option_takes_is_explained(page, names):
    assert [name for name in names if f"`{name}`" not in text_of(page)] == []


def test_every_command_is_named_and_no_other_is():
    groups = {name: set(getattr(command, "commands", ())) for name, command in COMMANDS.items()}
    named = re.findall(r"(?:`|^|\$ )feddp (?!needs)([a-z][\w-]*)(?: ([a-z]+))?", ALL, re.MULTILINE)
    assert {name for name, _ in named} == groups.keys()
    for name, below in named:
        assert not groups[name] or not below or below in groups[name], f"feddp {name} {below}"


def test_every_requirement_is_explained():
    """Its row in the dependency table, by the name that pip knows it by."""
    pinned = {re.split(r"[=;]", line)[0] for line in (ROOT / "requirements.txt").read_text().splitlines() if "==" in line}
    table = text_of("docs/how-to/dependencies.md").split("## What each dependency is for")[1].split("\n## ")[0]
    named = {name.strip() for row in re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE) for name in row.split(",")}
    assert pinned == named - {"package", "---"}


def test_the_order_of_packages_is_the_enforced_one():
    contract = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("\nlayers = [")[1].split("]")[0]
    enforced = [layer for layer in re.findall(r'"([^"]+)"', contract) if layer != "__main__"]
    (shown,) = [block.text for block in blocks("docs/explanation/architecture.md") if " > " in block.text]
    assert " ".join(shown.split()).split(" > ") == enforced


@pytest.mark.parametrize("page", PAGES)
def test_every_test_and_every_file_that_is_named_is_there(page):
    """A file of tests, a test, or the beginning of some tests' names; files of the package and of the repository."""
    text = text_of(page)
    sources = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    tests = [name for source in sources.values() for name in re.findall(r"^def (test_\w+)", source, re.MULTILINE)]
    named = set(re.findall(r"\btest_\w+", text))
    assert [n for n in named if n not in sources and not any(t == n or n[-1] == "_" and t.startswith(n) for t in tests)] == []
    paths = re.findall(r"`((?:tests|custom|benchmarks|poc|docs|provisioning/images)/[\w/.-]+)`", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []
    inside = re.findall(r"`((?:cli|stages|flare|methods|training|networks|features|run|plan|jobs)/\w+\.py)`", text)
    assert [path for path in (*inside, *re.findall(r"`(\w+\.py)`", text)) if not list((ROOT / "custom").rglob(path))] == []
    assert [name for name in re.findall(r"`(feddp\.[\w.]+)`", text) if not dotted(name)] == []


def dotted(name: str) -> bool:
    """Whether a dotted name is a module of the package, or stands in one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        path = ROOT / "custom" / "/".join(parts[:length])
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if file.exists():
            rest = parts[length : length + 1]
            return not rest or rest == ["methods"] or bool(re.search(rf"\b{rest[0]}\b", file.read_text(encoding="utf-8")))
    return False


def test_papers_are_cited_by_author_and_year():
    """Never by the numbers of files that the reader does not have: in no page, and in no method's docstrings."""
    texts = {page: text_of(page) for page in PAGES}
    for path in (ROOT / "custom/feddp/methods").glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        documented = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
        texts[path.name] = "\n".join(ast.get_docstring(node) or "" for node in documented)
    assert [name for name, text in texts.items() if PAPER_NUMBER.search(text)] == []
    short = set(re.findall(r"\*\*[^*]+\*\* \(([^)]+)\)", text_of("docs/reference/bibliography.md")))
    cited = set(re.findall(r"\b([A-Z]\w+ et al\., (?:[A-Z]\w* )?\d{4})", "\n".join(texts.values())))
    assert len(short) > 10
    assert cited <= short


# --- troubleshooting -----------------------------------------------------------------------------------------------------


def test_the_messages_that_are_explained_are_those_of_the_package():
    """What the first column quotes stands in the source, whole or in the parts that a name divides."""
    said = (ROOT / "poc/environment.sh").read_text(encoding="utf-8")
    for path in (ROOT / "custom/feddp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                said += "\n" + "".join(parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                said += "\n" + node.value
    text = text_of("docs/how-to/troubleshooting.md").split("## Who is refused")[0]
    quoted = [quote for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for quote in re.findall(r"`([^`]+)`", row)]
    assert len(quoted) > 25
    assert [quote for quote in quoted if quote not in said] == []
