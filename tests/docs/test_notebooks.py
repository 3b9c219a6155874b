"""The notebooks of the gallery: valid, the same at every time, and one of them runs."""

import ast
import importlib.util
import json
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
_SPEC = importlib.util.spec_from_file_location("notebooks", ROOT / "docs" / "notebooks.py")
notebooks = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(notebooks)
PROGRAMS = sorted((ROOT / "examples" / "gallery").glob("*.py"))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.stem)
def test_a_notebook_has_the_program_s_code_and_calls_it(program):
    text = notebooks.notebook(program)
    assert text == notebooks.notebook(program)
    made = json.loads(text)
    about, body, call = ("".join(cell["source"]) for cell in made["cells"])
    assert [cell["cell_type"] for cell in made["cells"]] == ["markdown", "code", "code"]
    assert about.startswith("# " + ast.get_docstring(ast.parse(program.read_text())).splitlines()[0])
    if body.startswith("%%writefile"):
        line, body = body.split("\n", 1)
        assert line == f"%%writefile {program.name}"
    theirs = [ast.dump(node) for node in ast.parse(program.read_text()).body[1:-1]]
    assert [ast.dump(node) for node in ast.parse(body).body] == theirs
    assert ast.unparse(ast.parse(call).body[-1]) == "main()"


def test_the_written_notebooks_are_valid(tmp_path):
    for path in notebooks.write(tmp_path):
        nbformat.validate(nbformat.read(path, as_version=4))
    assert len(list(tmp_path.glob("*.ipynb"))) == len(PROGRAMS)


@pytest.mark.release
@pytest.mark.filterwarnings("ignore")  # of Jupyter, about its own names
@pytest.mark.parametrize("name", ["own_method", "exact_regression"])
def test_a_notebook_runs(name, tmp_path):
    client = pytest.importorskip("nbclient", reason="needs nbclient")
    pytest.importorskip("ipykernel", reason="needs ipykernel")
    text = notebooks.notebook(ROOT / "examples/gallery" / f"{name}.py")
    made = nbformat.reads(text, as_version=4)
    client.NotebookClient(made, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = "".join(out.get("text", "") for out in made.cells[-1].outputs if out.get("name") == "stdout")
    assert shown.strip()
