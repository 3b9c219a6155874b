"""The programs in examples/ run; at full size, training together beats each client alone, as their pages say."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {"audio_classification": "audio-classification", "object_detection": "object-detection"}
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about its own names


def program(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_program_has_a_page_with_its_command():
    files = (ROOT / "examples").glob("*.py")
    assert {path.stem for path in files if "def main(" in path.read_text()} == set(PROGRAMS)
    for name, page in PROGRAMS.items():
        text = (ROOT / "docs" / "how-to" / f"{page}.md").read_text()
        assert f"$ python examples/{name}.py\n" in text
        assert f"python examples/{name}.py\n" in (ROOT / "examples" / f"{name}.py").read_text()


@pytest.mark.proof
def test_recordings_are_classified(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.mkdtemp", lambda: str(tmp_path))
    found = program("audio_classification").main(["--rows", "4", "--rounds", "1"])
    assert list(found) == ["together", "north alone", "south alone", "west alone"]
    assert all(0 <= accuracy <= 1 for accuracy in found.values())
    assert "of 12 test recordings" in capsys.readouterr().out


@pytest.mark.proof
def test_the_object_detection_example_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.mkdtemp", lambda: str(tmp_path))
    found = program("object_detection").main(["--rows", "4", "--rounds", "1"])
    assert list(found) == ["together", "north alone", "south alone", "west alone"]
    assert all(0 <= precision <= 1 for precision in found.values())
    assert "4 test pictures" in capsys.readouterr().out


def test_average_precision_by_hand():
    """Two pictures: the best box is right, the second is nowhere, the third finds the other object."""
    import numpy as np

    one, other, nowhere = [0.3, 0.3, 0.2, 0.2], [0.7, 0.7, 0.2, 0.2], [0.1, 0.9, 0.1, 0.1]
    scores = np.zeros((2, 2, 3))
    scores[0, :, 0], scores[1, :, 0] = (0.9, 0.8), (0.7, 0.6)
    boxes = np.array([[one, nowhere], [other, other]])
    targets = [{"class_labels": np.array([0]), "boxes": np.array([box])} for box in (one, other)]

    class Found:
        predictions, label_ids = [(scores, boxes)], [targets]

    value = program("object_detection").average_precision(Found)
    assert value["by_class"] == {"disc": pytest.approx((1 + 2 / 3) / 2)}
    assert value["map_50"] == pytest.approx((1 + 2 / 3) / 2)


@pytest.mark.release
@pytest.mark.parametrize("name", PROGRAMS)
def test_together_is_better_than_each_client_alone_as_the_page_says(name, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.mkdtemp", lambda: str(tmp_path))
    found = program(name).main([])
    assert found["together"] > max(value for who, value in found.items() if who != "together")
    page = (ROOT / "docs" / "how-to" / f"{PROGRAMS[name]}.md").read_text()
    said = dict(re.findall(r"^(together|\w+ alone) +(0\.\d+) ", page, re.M))
    assert {who: float(value) for who, value in said.items()} == pytest.approx(found, abs=0.05)
