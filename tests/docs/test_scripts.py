"""Benchmarks, reproductions and examples use names of fedfm that exist: few of them run in tests."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(f for folder in ("benchmarks", "reproduce", "examples") for f in (ROOT / folder).rglob("*.py"))


def names_in(tree):
    """(module, name) of everything taken from fedfm: imported names, and attributes of imported modules."""
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "fedfm":
            for alias in node.names:
                yield node.module, alias.name
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield modules[node.value.id], node.attr


def exists(module, name):
    """Whether the module has the name. Attributes of an object that is not a module are not checked."""
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and not error.name.startswith("fedfm"):
            pytest.skip(f"{error.name} is not installed")
        return True
    if hasattr(found, name):
        return True
    try:
        importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return False
    return True


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_all_that_a_script_takes_from_fedfm_exists(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert [f"{module}.{name}" for module, name in names_in(tree) if not exists(module, name)] == []


def test_a_name_that_has_moved_is_found():
    tree = ast.parse("from fedfm.models import images, nothing\nimages.tell(1)\nimages.pixels(2)\n")
    assert [found for found in names_in(tree) if not exists(*found)] == [
        ("fedfm.models", "nothing"),
        ("fedfm.models.images", "tell"),
    ]
