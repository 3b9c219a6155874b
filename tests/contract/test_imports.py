"""The graph of imports, with those for type checkers: no files import each other in a circle.

``lint-imports`` checks packages and folders, without imports for type checkers, which may name few classes above.
"""

import ast
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "fedfm"
NAMED_BELOW = {  # what packages below name in their types: all else that they read of it stands in protocols of theirs
    "fedfm.models.model",
    "fedfm.privacy.accountant",
    "fedfm.privacy.spec",
}


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("fedfm", exclude_type_checking_imports=False, cache_dir=None)


def circle(imports: dict[str, set[str]]) -> list[str]:
    """The files of one circle; [] if there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_circle_of_files(graph):
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert circle(imports) == []
    imports["fedfm.errors"] = {"fedfm.core.fields"}  # the search finds what is there
    assert len(circle(imports)) > 2


def test_types_of_packages_above_are_few(graph):
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    floors = [[name.strip() for name in layer.split("|")] for layer in contract["layers"]]
    height = {package: -level for level, packages in enumerate(floors) for package in packages}

    def floor(module: str) -> int | None:
        return height.get(".".join(module.split(".")[:2]))

    up = {
        other
        for module in graph.modules
        for other in graph.find_modules_directly_imported_by(module)
        if None not in (floor(module), floor(other)) and floor(module) < floor(other)
    }
    assert up <= NAMED_BELOW


def test_no_name_of_a_package_is_that_of_a_file_in_it():
    """Python replaces the name by the file as soon as somebody imports the file."""
    hidden = []
    for package in SRC.rglob("__init__.py"):
        files = {path.stem for path in package.parent.iterdir()} - {"__init__"}
        for node in ast.parse(package.read_text(encoding="utf-8")).body:
            name = getattr(node, "name", None)
            if name in files:
                hidden.append(f"{package.relative_to(SRC)} {name}")
    assert not hidden
