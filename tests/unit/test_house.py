"""The package's own order: names that mean one thing. What imports what is import-linter's to check (pyproject.toml)."""

import ast
from collections import defaultdict
from pathlib import Path

import feddp
from support.order import LONGEST

PACKAGE = Path(feddp.__file__).parent
MODULES = {path.relative_to(PACKAGE): ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}


def test_no_two_classes_have_one_name():
    places = defaultdict(list)
    for path, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_no_name_of_a_module_means_three_things():
    """Two may share a name where one layer rests on the other, as a stage and its command do."""
    places = defaultdict(list)
    for path in MODULES:
        if path.stem != "__init__":
            places[path.stem].append(str(path))
    assert {name: paths for name, paths in places.items() if len(paths) > 2} == {}


def test_no_module_imports_itself_by_way_of_others():
    """Imports within functions and for types alone are counted too."""
    names = {".".join(("feddp", *path.with_suffix("").parts)).removesuffix(".__init__"): tree for path, tree in MODULES.items()}
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


def test_the_files_of_tests_that_start_first_exist():
    assert [name for name in LONGEST if not (Path(__file__).parents[1] / name).is_file()] == []
