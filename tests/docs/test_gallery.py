"""The programs of examples/gallery/ run, say what their first line says, and stand on the gallery's page."""

import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GALLERY = ROOT / "examples" / "gallery"
SMALL = {  # arguments with which a program takes seconds
    "one_round": {"limit": 150},
    "secret_model": {"limit": 100, "rounds": 1},
    "personal_models": {"rounds": 3},
    "experts_and_gate": {"n": 30},
    "double_blind": {"limit": 60, "rounds": 2},
    "exact_regression": {},
    "own_module": {"rounds": 3},
    "own_method": {"limit": 100, "rounds": 2},
    "private_clients": {"limit": 200, "rounds": 1},
    "robust": {"limit": 150, "rounds": 3},
    "leave": {"limit": 200},
    "real_sites": {"limit": 60, "rounds": 1},
}
SAYS = {  # what the program shows, at this size
    "personal_models": lambda found: found["fedbip"] > found["fedavg"],
    "exact_regression": lambda found: found["r2"] > 0.99,
    "private_clients": lambda found: found["epsilon"] <= 8.0,
    "robust": lambda found: found["median"] > found["mean"],
    "real_sites": lambda found: found["local"] == found["deployment"],
}


def test_every_program_is_on_the_page_with_its_command_and_not_named_like_a_module():
    programs = {path.stem for path in GALLERY.glob("*.py")}
    assert programs == set(SMALL)
    page = (ROOT / "docs/how-to/gallery.md").read_text()
    assert set(re.findall(r"examples/gallery/(\w+)\.py\)", page)) == programs
    assert not programs & sys.stdlib_module_names  # Python would import it in place of its own
    for name in programs:
        assert f"\npython examples/gallery/{name}.py\n" in (GALLERY / f"{name}.py").read_text()


@pytest.mark.filterwarnings("ignore")  # of transformers and Flower, about their own names
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.deployment if n == "real_sites" else pytest.mark.proof]) for n in SMALL]
)
def test_a_program_runs_and_shows_what_it_says(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(GALLERY))
    found = importlib.import_module(name).main(**SMALL[name])
    assert found
    assert SAYS.get(name, lambda found: True)(found), found
    assert capsys.readouterr().out.strip()
