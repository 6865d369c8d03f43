"""The package's own order: names that mean one thing. What imports what is import-linter's to check (pyproject.toml)."""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import feddp
from support.order import LONGEST

PACKAGE = Path(feddp.__file__).parent


@cache
def modules() -> dict[Path, ast.Module]:
    """Parsed once, where a test of this file runs, and not wherever tests are found."""
    return {path.relative_to(PACKAGE): ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}


def test_no_two_classes_have_one_name():
    places = defaultdict(list)
    for path, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_no_name_of_a_module_means_three_things():
    """Two may share a name where one layer rests on the other, as a stage and its command do."""
    places = defaultdict(list)
    for path in modules():
        if path.stem != "__init__":
            places[path.stem].append(str(path))
    assert {name: paths for name, paths in places.items() if len(paths) > 2} == {}


def test_no_module_imports_itself_by_way_of_others():
    """Imports within functions and for types alone are counted too."""
    dotted = {path: ".".join(("feddp", *path.with_suffix("").parts)).removesuffix(".__init__") for path in modules()}
    names = {dotted[path]: tree for path, tree in modules().items()}
    imports = {name: {found for found in _imported(tree) if found in names and found != name} for name, tree in names.items()}
    while free := {name for name, wanted in imports.items() if not wanted & imports.keys()}:
        imports = {name: wanted for name, wanted in imports.items() if name not in free}
    assert imports == {}, "in a cycle, or above one"


def _imported(tree: ast.Module):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_process_is_started_in_a_folder_of_our_choice():
    """Python looks first for modules where it is started: in the user's folder, they may be another user's."""
    assert {str(path): found for path, tree in modules().items() if (found := [*_started_anywhere(tree)])} == {}
    for wrong in (
        "subprocess.run([])",
        "subprocess.Popen([], env=env)",
        "os.system('')",
        "os.execv('', [])",
        "multiprocessing.Process()",
    ):
        assert [*_started_anywhere(ast.parse(wrong))], f"the control: {wrong}"


def _started_anywhere(tree: ast.Module):
    """Gives what starts a process without `cwd`, of subprocess, or at all, of the other modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            called = f"{node.func.value.id}.{node.func.attr}"
            if called in ("subprocess.Popen", "subprocess.run", "subprocess.call", "subprocess.check_output"):
                if "cwd" not in {word.arg for word in node.keywords}:
                    yield called
            elif called.startswith(("os.system", "os.exec", "os.spawn", "os.posix_spawn", "os.popen", "multiprocessing.")):
                yield called


def test_nobody_but_the_writer_writes_to_a_terminal():
    """What ruff's bans (pyproject.toml) do not see: `print` handed on, streams by another name, bars on another console."""
    others = {path: tree for path, tree in modules().items() if str(path) != "terminal.py"}
    assert {str(path): found for path, tree in others.items() if (found := [*_writing(tree)])} == {}
    for wrong in ("run(print)", "getattr(sys, 'stdout')", "Live()", "Progress()", "open('/dev/tty')", "os.write(1, b'')"):
        assert [*_writing(ast.parse(wrong))], f"the control: {wrong}"


def _writing(tree: ast.Module):
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "print":
            yield "print"
        elif isinstance(node, ast.Constant) and node.value in ("stdout", "stderr", "/dev/tty", "/dev/stdout", "/dev/stderr"):
            yield node.value
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            numbers = [word.value for word in node.args[:1] if isinstance(word, ast.Constant)]
            if name in ("Live", "Progress", "Status") and "console" not in [word.arg for word in node.keywords]:
                yield f"{name} on a console of rich's own"
            elif name in ("write", "fdopen") and numbers in ([1], [2]):
                yield f"{name} to a stream by its number"


def test_no_line_is_exempt_from_the_ban_but_types():
    """ruff's own exemptions, and those of pyproject.toml: two programs whose stdout is a pipe, and the writer."""
    root = PACKAGE.parents[1]
    lines = [
        line for path in (*PACKAGE.rglob("*.py"), *root.glob("benchmarks/**/*.py")) for line in path.read_text().splitlines()
    ]
    assert {line.split("noqa: ")[1] for line in lines if "noqa: T" in line} <= {"TID251 (the type)"}
    rules = (root / "pyproject.toml").read_text(encoding="utf-8")
    assert rules.count('= ["TID251"]') == rules.count('"custom/feddp/{run/worker,data/formats/codec}.py" = ["TID251"]') == 1


def test_the_files_of_tests_that_start_first_exist():
    assert [name for name in LONGEST if not (Path(__file__).parents[1] / name).is_file()] == []
