"""Test and validation rows that are also training rows, and rows that only look like it."""

from __future__ import annotations

import io
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedfm.data.load import load_table
from fedfm.data.repeats import of_training_rows
from fedfm.data.spec import DataSpec
from fedfm.data.table import Table


def encoded(pixels: np.ndarray, form: str = "PNG", **how: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(file, form, **how)
    return file.getvalue()


def picture(value: int, channels: int = 3) -> np.ndarray:
    """A smooth picture with some noise; no two values have one alike."""
    rng = np.random.default_rng(value)
    coarse = rng.integers(0, 256, (6, 6, channels)).astype(np.uint8)
    planes = [np.asarray(Image.fromarray(coarse[..., c]).resize((48, 48))) for c in range(channels)]
    noisy = np.stack(planes, -1) + rng.normal(0, 3, (48, 48, channels))
    return noisy.clip(0, 255).astype(np.uint8)


def vector(value: int) -> np.ndarray:
    """Its first 300 numbers are those of all others."""
    return np.concatenate([np.zeros(300), np.random.default_rng(value).normal(size=20)]).astype(np.float32)


OF: dict[str, tuple[str, Callable[[list[int]], Any]]] = {
    "features": ("features", lambda v: np.stack([vector(i) for i in v])),
    "pixels": ("image", lambda v: np.stack([picture(i, 1) for i in v])),
    "encoded": ("image", lambda v: [encoded(picture(i)) for i in v]),
    "text": ("text", lambda v: [f"text {i:03d}" for i in v]),
    "instruction": ("instruction", lambda v: [((("user", "hi"),), f"{i}") for i in v]),
}


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(list(OF)),
    values=st.lists(st.integers(0, 12), min_size=2, max_size=20),
    seed=st.integers(0, 2**32 - 1),
)
def test_rows_that_are_training_rows_are_counted(kind: str, values: list[int], seed: int) -> None:
    """Compared with a count by lists, for every kind of input; equal beginnings and lengths are not enough."""
    split = np.random.default_rng(seed).choice(["train", "val", "test"], len(values))
    name, inputs = OF[kind]
    table = Table(name, inputs(values), None, (), split)  # type: ignore[arg-type]
    of = {s: [v for v, m in zip(values, split, strict=True) if m == s] for s in ("train", "val", "test")}
    counts = [(sum(v in of["train"] for v in of[s]), len(of[s]), word) for s, word in PARTS]
    told = " and ".join(f"{n} of {total} {word} rows" for n, total, word in counts if n)
    found = of_training_rows(table)
    assert (found or "").split(" are also")[0] == told


PARTS = (("val", "validation"), ("test", "test"))
WRITTEN: list[Callable[[str], str]] = [
    str.upper,
    lambda t: f"  {t}\n",
    lambda t: t.replace(" ", "\u00a0 "),
    lambda t: unicodedata.normalize("NFD", t),
    lambda t: t.replace("e", "e\u200b"),
]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(WRITTEN), min_size=1, max_size=8))
def test_texts_that_are_written_otherwise_are_alike(ways: list[Callable[[str], str]]) -> None:
    known = [f"Der Bär {i} fischt gerne" for i in range(8)]
    tested = [way(text) for way, text in zip(ways, known, strict=False)] + ["Die Bärin 0 fischt gerne"]
    for kind, row in (("text", str), ("instruction", lambda t: (t, "ja"))):
        table = Table(
            kind, [row(t) for t in known + tested], None, (), np.array(["train"] * 8 + ["test"] * len(tested))
        )
        assert (of_training_rows(table) or "").startswith(
            f"{len(ways)} of {len(tested)} test rows are equal to training rows except"
        )


FORMS: dict[str, Callable[[np.ndarray], bytes]] = {
    "bmp": lambda x: encoded(x, "BMP"),
    "png": lambda x: encoded(x, "PNG", compress_level=0),
    "jpeg": lambda x: encoded(x, "JPEG", quality=60),
    "webp": lambda x: encoded(x, "WEBP", quality=60),
    "larger": lambda x: encoded(np.asarray(Image.fromarray(x).resize((100, 100)))),
    "grey": lambda x: encoded(np.asarray(Image.fromarray(x).convert("L"))[..., None]),
}


@pytest.mark.parametrize("form", FORMS)
def test_pictures_that_are_stored_otherwise_are_alike(form: str) -> None:
    inputs = [encoded(picture(i)) for i in range(40)]
    tested = [FORMS[form](picture(i)) for i in (3, 5, 8)] + [FORMS[form](picture(100 + i)) for i in range(9)]
    table = Table("image", inputs + tested, None, (), np.array(["train"] * 40 + ["test"] * 12))
    assert (of_training_rows(table) or "").startswith("3 of 12 test rows look the same as a training image")


def test_vectors_with_fewer_digits_are_alike() -> None:
    x = np.stack([vector(i) for i in range(60)]) + 100  # far from 0, as measurements are
    tested = np.concatenate([np.round(x[:7], 3), np.stack([vector(100 + i) for i in range(20)]) + 100])
    table = Table("features", np.concatenate([x, tested]), None, (), np.array(["train"] * 60 + ["test"] * 27))
    assert (of_training_rows(table) or "").startswith("7 of 27 test rows are equal to training rows except")


def test_pictures_of_one_scene_are_not_alike() -> None:
    """They differ in little; it is how far training rows lie apart that counts."""
    scene = picture(0)[None].astype(int)
    shots = (scene + np.random.default_rng(0).normal(0, 2, (60, 48, 48, 3))).clip(0, 255).astype(np.uint8)
    assert of_training_rows(Table("image", shots, None, (), np.array(["train"] * 40 + ["test"] * 20))) is None


def test_rows_of_another_client_count(tmp_path: Any) -> None:
    for name, split in (("a", "train"), ("b", "test")):
        rows = [f"text {i},x,{split}" for i in range(6)] + [f"own {name} {i},y,train" for i in range(6)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["text,label,split", *rows]))
    spec = DataSpec(clients={name: str(tmp_path / f"{name}.csv") for name in ("a", "b")}, test_fraction=0.0)
    (found,) = (n for n in load_table(spec, seed=0).notices if "training rows" in n)
    assert found.startswith("6 of 6 test rows")


def test_pictures_in_files_are_compared_by_content(tmp_path: Path) -> None:
    for i, value in enumerate((0, 1, 0, 2, 3)):
        (tmp_path / f"{i}.png").write_bytes(encoded(picture(value)))
    files = [str(tmp_path / f"{i}.png") for i in range(5)]
    split = np.array(["train", "train", "test", "test", "test"])
    assert (of_training_rows(Table("image", files, None, (), split)) or "").startswith("1 of 3 test rows are also")
