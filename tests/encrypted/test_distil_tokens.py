"""Students with other tokens than their teacher's: another size of pictures, no class token; crops; what is refused."""

import json

import pytest
import torch
from PIL import Image

from fedfm.config.toml import to_toml
from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec
from fedfm.encrypted.student import conversion, distil_rows
from fedfm.encrypted.student.distil import distil
from fedfm.encrypted.student.distil_rows import Lessons, boxes_of, cut_rows
from fedfm.encrypted.student.distil_spec import Distillation
from fedfm.encrypted.student.distillation_loss import Recipe, Taps
from fedfm.encrypted.student.token_grid import processor_for, with_tokens
from fedfm.errors import InputError
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.runtime.progress import EpochProgress
from small import pictures
from tiny_students import full, tiny
from tiny_text import save_bert


class Killed(EpochProgress):
    """Ends the process after so many steps."""

    def __init__(self, steps):
        self.left = steps

    def step(self):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Pictures of 12 x 12, and a ViT for them: nine patches and a class token."""
    folder = tmp_path_factory.mktemp("tokens")
    pictures(folder, 96, side=12)
    tiny("vit", folder / "start", size=(12, 12))
    return folder


def of_pictures(folder):
    spec = ModelSpec(str(folder), adaptation=AdaptationSpec("full"))
    return load_model(spec, classes=("ant", "bee", "cow", "dog"), kind="image")


def tables(place, **distil):
    known = {"epochs": [6, 1, 1], "learning_rates": [5e-3, 1e-3, 1e-4], "batch_size": 8, "threads": 1}
    known |= {"image_size": 8, "class_token": False, "views": 2, "decay": 0.5, "ramp": 0.5}
    known = {key: value for key, value in (known | distil).items() if value is not None}
    return {"data": {"path": str(place / "pictures.npz")}, "model": {"name": str(place / "start")}, "distil": known}


@pytest.mark.parametrize("kind", ["vit", "deit", "ijepa"])
def test_other_sizes_have_the_positions_that_transformers_interpolates(tmp_path, kind):
    model = full(tiny(kind, tmp_path, size=(12, 12), head=True))
    x = torch.randn(2, 3, 8, 8)
    made = with_tokens(model, 8, True)
    with torch.no_grad():
        want = model.module(pixel_values=x, interpolate_pos_encoding=True).logits
        assert torch.allclose(made(pixel_values=x).logits, want, atol=1e-6)
    assert made.config.image_size == 8
    assert processor_for(model.tools.processor, 8)(Image.new("RGB", (30, 20)))["pixel_values"][0].shape == (3, 8, 8)


@pytest.mark.parametrize(("kind", "extra"), [("vit", 1), ("deit", 2)])
def test_without_class_tokens_the_patches_go_alone(tmp_path, kind, extra):
    """By hand: the layers of the ViT on its patches, final norm, mean over the patches, classifier."""
    model = full(tiny(kind, tmp_path, size=(12, 12), head=True))
    inner = getattr(model.module, kind)
    x = torch.randn(2, 3, 12, 12)
    made = with_tokens(model, None, False)
    with torch.no_grad():
        h = inner.embeddings.patch_embeddings(x) + inner.embeddings.position_embeddings[:, extra:]
        for layer in inner.layers:
            h = layer(h)
        want = model.module.classifier(inner.layernorm(h).mean(1))
        assert torch.allclose(made(pixel_values=x).logits, want, atol=1e-6)
    assert made.config.model_type == "ijepa"


def test_tokens_that_cannot_change(tmp_path):
    vit = full(tiny("vit", tmp_path / "vit"))
    with pytest.raises(InputError, match=r"distil.image_size = 10: expected a multiple of the patch size, 4 x 4"):
        with_tokens(vit, 10, True)
    with pytest.raises(InputError, match=r"distil.class_token = false: .*'ijepa' has no class token"):
        with_tokens(full(tiny("ijepa", tmp_path / "ijepa")), 8, False)
    spec = ModelSpec(str(save_bert(tmp_path / "bert")), adaptation=AdaptationSpec("full"))
    with pytest.raises(InputError, match=r"distil.image_size: a model of type 'bert' cannot"):
        with_tokens(load_model(spec, classes=("x", "y"), kind="text"), 8, True)


@pytest.mark.proof
def test_a_student_of_smaller_images_without_a_class_token(place, tmp_path):
    result = distil(tables(place), tmp_path / "student")
    config = json.loads((tmp_path / "student" / "config.json").read_text())
    assert (config["model_type"], config["image_size"]) == ("ijepa", 8)
    assert json.loads((tmp_path / "student" / "preprocessor_config.json").read_text())["size"]["width"] == 8
    spec = ModelSpec(str(tmp_path / "student"), adaptation=AdaptationSpec("full"))
    twin = load_model(spec, classes=("x", "y"), kind="image")
    fhe = conversion.fold(twin.module) if result["outside"] <= conversion.MOST_OUTSIDE else None
    assert fhe is None or fhe.positions.shape == (4, 8)
    assert twin.parts.embedding.position_embeddings.shape == (1, 4, 8)
    assert result["distance"] < 0.9
    # With steps enough for three epochs: a killed one goes on to the same bits, its teacher's outputs read again.
    with pytest.raises(KeyboardInterrupt):
        distil(tables(place), tmp_path / "again", watcher=Killed(31))
    kept = sorted(p.name for p in (tmp_path / "again" / "checkpoint").glob("teacher-*"))
    assert kept == ["teacher-000.safetensors", "teacher-001.safetensors"]
    again = distil(tables(place), tmp_path / "again")
    assert again["params_sha256"] == result["params_sha256"]


def test_the_teacher_sees_what_the_student_sees(place, tmp_path):
    """Crops by slices of the pictures, at the size of each; the teacher's outputs of them."""
    table = load_table(DataSpec(path=str(place / "pictures.npz")), seed=0, task="classification")
    teacher, index = of_pictures(place / "start"), table.rows("train")[:10]
    student = of_pictures(tiny("ijepa", tmp_path))
    lessons = Lessons(tmp_path, table, Taps(teacher), student, index, views=3, seed=5, low=False)
    boxes = boxes_of(5, 2, 10)
    assert boxes != boxes_of(5, 1, 10)
    assert boxes == boxes_of(5, 2, 10)
    cut = []
    for picture, box in zip(table.take(index).inputs, boxes, strict=True):
        assert 0.4 <= box.side**2 <= 1
        assert max(box.left, box.top) + box.side <= 1
        x0, x1 = round(box.left * 12), round((box.left + box.side) * 12)
        y0, y1 = round(box.top * 12), round((box.top + box.side) * 12)
        part = picture[y0:y1, x0:x1]
        cut.append(Image.fromarray(part[:, ::-1] if box.mirrored else part))
    rows = lessons.of(3)
    batch = rows.batch([4, 1])
    assert {box.mirrored for box in boxes} == {True, False}
    assert torch.equal(batch["pixel_values"], student.tools.image([cut[4], cut[1]]))
    with torch.no_grad():
        want = teacher.module(pixel_values=teacher.tools.image([cut[4], cut[1]])).logits
    assert torch.allclose(batch["teacher_logits"], want, atol=1e-5)
    assert batch["teacher_features"].shape == (2, 8)
    plain = lessons.of(4).batch([0])["pixel_values"]
    assert torch.equal(plain, student.prepare(table, index[:1]).tensors["pixel_values"])
    assert len(list(lessons.calibration_batches())) == 3


def test_crops_of_many_pictures_are_made_batch_by_batch(place, tmp_path, monkeypatch):
    table = load_table(DataSpec(path=str(place / "pictures.npz")), seed=0, task="classification")
    model, index = of_pictures(place / "start"), table.rows("train")[:6]
    want = cut_rows(model, table, index, boxes_of(0, 1, 6)).batch([5, 2])
    monkeypatch.setattr("fedfm.api.model_folder.IN_ADVANCE", 1)
    lessons = Lessons(tmp_path, table, Taps(of_pictures(place / "start")), model, index, views=2, seed=0, low=False)
    got = lessons.view(1)
    assert isinstance(got.rows, distil_rows.LazyBoxes)
    assert torch.equal(got.batch([5, 2])["pixel_values"], want["pixel_values"])


def test_rates_and_weights_by_hand():
    recipe = Recipe(learning_rates=(4.0, 2.0, 1.0), decay=0.1, tameness=5.0, ramp=0.5)
    assert [recipe.rate(0, part) for part in (0, 0.5, 1)] == pytest.approx([4.0, 2.2, 0.4])
    assert [recipe.weight(part) for part in (0, 0.25, 0.5, 1)] == pytest.approx([0.005, 5 * 10**-1.5, 5, 5])
    assert Recipe().rate(1, 0.7) == Recipe().learning_rates[1]
    assert Recipe().weight(0) == Recipe().tameness


@pytest.mark.proof
def test_a_bfloat16_teacher_gives_a_student(place, tmp_path):
    plain, low = (distil(tables(place, bfloat16=low, views=1), tmp_path / str(low)) for low in (False, True))
    assert plain["params_sha256"] != low["params_sha256"]
    assert low["distance"] == pytest.approx(plain["distance"], abs=0.1)


def test_views_of_texts_are_refused(tmp_path):
    (tmp_path / "rows.csv").write_text("text,label\n" + "".join(f"w{i} w{i + 1},{'ab'[i % 2]}\n" for i in range(20)))
    save_bert(tmp_path / "bert")
    table = {"data": {"path": str(tmp_path / "rows.csv")}, "model": {"name": str(tmp_path / "bert")}}
    with pytest.raises(InputError, match=r"distil.views = 2: .*rows.csv contains no images"):
        distil(table | {"distil": {"views": 2}}, tmp_path / "student")


@pytest.mark.parametrize("bad", ["views = 0", "decay = 0.0", "ramp = 1.5", "image_size = 0", "class_token = 1"])
def test_wrong_settings_say_so(tmp_path, bad):
    base = {"data": {"name": "digits"}, "model": {"name": "nano-vit"}}
    (tmp_path / "twin.toml").write_text(to_toml(base) + f"\n[distil]\n{bad}\n")
    with pytest.raises(InputError, match=f"distil.{bad.split()[0]}"):
        Distillation.load(tmp_path / "twin.toml")
