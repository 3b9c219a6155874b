"""`fedfm distil` from the command line: its folder, its table, a resume after a kill, and its refusals."""

import json

import pytest

from central import Lines, call, kill_after_an_epoch
from fedfm.api import execute
from fedfm.config.toml import to_toml
from fedfm.encrypted.student import conversion
from fedfm.encrypted.student.distil import distil
from fedfm.errors import InputError
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec
from small import pictures
from tiny_students import tiny

EPOCHS = [6, 2, 2]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with rows and a tiny model."""
    folder = tmp_path_factory.mktemp("distil")
    pictures(folder, 120, side=8)
    tiny("ijepa", folder / "start")
    return folder


def tables(place, **changes):
    known = {
        "data": {"path": str(place / "pictures.npz")},
        "model": {"name": str(place / "start")},
        "distil": {"epochs": EPOCHS, "learning_rates": [5e-3, 1e-3, 1e-4], "batch_size": 8, "threads": 1},
    }
    return {k: {**v, **changes.get(k, {})} for k, v in known.items()} | {
        k: v for k, v in changes.items() if k not in known
    }


def toml(place, folder, **changes):
    path = folder / "twin.toml"
    path.write_text(to_toml(tables(place, **changes)))
    return path


@pytest.fixture(scope="module")
def whole(place, tmp_path_factory):
    """(folder, result, lines) of an undisturbed distillation."""
    folder, seen = tmp_path_factory.mktemp("whole") / "student", Lines()
    return folder, distil(tables(place), folder, watcher=seen), seen.lines


def test_the_folder_is_a_student(whole):
    folder, result, lines = whole
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json",
        "distil.json",
        "model.safetensors",
        "preprocessor_config.json",
    ]
    assert [line["stage"] for line in lines] == ["tame"] * 6 + ["states"] * 2 + ["outputs"] * 2
    assert [line["learning_rate"] for line in lines] == [5e-3] * 6 + [1e-3] * 2 + [1e-4] * 2
    about = json.loads((folder / "distil.json").read_text())
    assert about["result"] == json.loads(json.dumps(result))
    assert about["history"] == lines
    table = json.loads((folder / "config.json").read_text())["fedfm_polynomials"]
    assert table["outside"] == result["outside"] == lines[-1]["outside"]
    assert len(result["blocks"]) == len(table["blocks"]) == 2
    for shown, stored in zip(result["blocks"], table["blocks"], strict=True):
        assert shown["inverse"] == stored["inverse"]
        assert 20 < shown["depth"] < 50
        assert 0 < stored["scale"] < stored["range"] <= stored["largest"]
    assert 0.5 < result["teacher_accuracy"] <= 1
    assert abs(result["accuracy"] - result["teacher_accuracy"]) < 0.3
    assert result["distance"] < 0.5
    model = load_model(ModelSpec(str(folder), adaptation=AdaptationSpec("full")), classes=("x", "y"), kind="image")
    assert conversion.is_polynomial_student(model.module)
    assert model.new == ("classifier",)
    assert model.params()["classifier.weight"].shape == (2, 8)


@pytest.mark.sample("3")
@pytest.mark.parametrize("steps", [3, 50, 90, 100, 115])
def test_an_interrupted_distillation_continues_to_the_same_bits(place, whole, tmp_path, steps):
    """12 steps an epoch: in the tame stage, at its last epoch, and in both later stages."""
    with pytest.raises(KeyboardInterrupt):
        distil(tables(place), tmp_path / "student", watcher=Lines(steps))
    with pytest.raises(InputError, match=r"is not finished: continue the `fedfm distil` that began it"):
        load_model(ModelSpec(str(tmp_path / "student")), classes=("a",), kind="image")
    seen = Lines()
    result = distil(tables(place), tmp_path / "student", watcher=seen)
    assert result["params_sha256"] == whole[1]["params_sha256"]
    assert len(seen.lines) == 10 - (steps - 1) // 12
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "student" / name).read_bytes() == (whole[0] / name).read_bytes()


@pytest.mark.proof
def test_a_killed_process_goes_on(place, whole, tmp_path, capsys):
    out = tmp_path / "student"
    kill_after_an_epoch("distil", toml(place, tmp_path), out)
    code, text, _ = call(capsys, "distil", tmp_path / "twin.toml", "--out", out, "--format", "json")
    assert code == 0
    assert json.loads(text)["params_sha256"] == whole[1]["params_sha256"]
    code, text, err = call(capsys, "distil", tmp_path / "twin.toml", "--out", out)
    assert (code, err) == (0, "")
    assert "held-out rows" in text
    assert f"{whole[1]['accuracy']:.4f}" in text
    assert text.count(" d=") == 2


def test_a_federation_starts_from_it(whole, place, tmp_path):
    result = execute.run(
        {
            "data": {"path": str(place / "pictures.npz"), "partition": {"name": "iid", "clients": 2}},
            "model": {"name": str(whole[0]), "adaptation": {"name": "lora"}},
            "method": {"name": "fedavg", "rounds": 1},
            "run": {"workers": 1},
        },
        tmp_path / "run",
    )
    assert 0 <= result["accuracy"] <= 1


def test_a_model_with_its_own_head_keeps_it(place, tmp_path):
    tiny("ijepa", tmp_path / "start", head=True)
    pictures(tmp_path, 60, side=8, classes=3)
    changes = {
        "data": {"path": str(tmp_path / "pictures.npz")},
        "model": {"name": str(tmp_path / "start")},
        "distil": {"epochs": [6, 1, 0]},
    }
    result = distil(tables(place, **changes), tmp_path / "student")
    spec = ModelSpec(str(tmp_path / "student"), adaptation=AdaptationSpec("full"))
    classes = ("ant", "bee", "cow")
    twin = load_model(spec, classes=classes, kind="image", keep_head=True)
    assert twin.new == ()
    assert twin.module.config.id2label == dict(enumerate(classes))
    assert load_model(spec, classes=classes, kind="image").new == ("classifier",)
    assert 0 <= result["agreement"] <= 1


def test_the_papers_polynomials(place, tmp_path):
    result = distil(tables(place, distil={"polynomials": "paper", "epochs": [6, 0, 1]}), tmp_path / "student")
    assert {block["exp"]["degree"] for block in result["blocks"]} == {6}
    assert {block["inverse"]["steps"] for block in result["blocks"]} == {7}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"distil": {"degree": 3}}, "distil.degree = 3: expected an even number"),
        ({"distil": {"epochs": [1, 1]}}, r"distil.epochs = \[1, 1\]: expected three integers"),
        ({"distil": {"epochs": [1, -1, 1]}}, "distil.epochs"),
        ({"distil": {"learning_rates": [0.0, 1.0, 1.0]}}, "distil.learning_rates"),
        ({"distil": {"polynomials": "chebyshev"}}, 'distil.polynomials = "?chebyshev'),
        ({"distil": {"tau": 3.0}}, "distil.tau: unknown key"),
        ({"model": {"adaptation": {"name": "lora"}}}, "distillation trains all parameters"),
        ({"model": {"weights": "random"}}, "no knowledge to distil"),
        ({"model": {"name": "nano-gpt2"}}, "model.name: .*reads text"),
        ({"data": {"partition": {"clients": 3}}}, "data.partition: distillation uses all rows in one place"),
        ({"method": {"name": "fedavg"}}, "method: unknown key"),
    ],
)
def test_invalid_distillations_are_refused(place, tmp_path, capsys, changes, says):
    code, _, err = call(capsys, "distil", toml(place, tmp_path, **changes), "--out", tmp_path / "student")
    assert code == 2
    with pytest.raises(InputError, match=says):
        raise InputError(err)
    assert not (tmp_path / "student").exists()


def test_a_student_outside_its_intervals_gives_a_notice(whole):
    from fedfm.encrypted.student.distil_table import table

    assert "encrypted runs refuse this student" not in table(whole[1] | {"outside": 0.001})
    assert "encrypted runs refuse this student" in table(whole[1] | {"outside": 0.0011})
    assert "encrypted runs refuse this student" in table(whole[1] | {"outside": float("nan")})
    assert "activations overflow" not in table(whole[1])
    assert "activations overflow" in table(whole[1] | {"distance": float("nan")})
