"""What reads without an error and looks like a mistake: pictures that lost their end, numbers for missing values,
labels among the features, texts that are none; and that good data say nothing.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from fedfm.data import feature_doubts, text_doubts
from fedfm.data.load import load_table
from fedfm.data.pictures import look
from fedfm.data.rows_to_predict import read_inputs
from fedfm.data.spec import DataSpec
from fedfm.data.table import Table
from fedfm.errors import InputError

FORMS = {"PNG": "png", "JPEG": "jpg", "GIF": "gif", "WEBP": "webp", "TIFF": "tif", "AVIF": "avif"}


def picture(seed: int, side: int = 48) -> Image.Image:
    cells = np.random.default_rng(seed).integers(0, 256, (6, 6, 3))
    return Image.fromarray(np.kron(cells, np.ones((side // 6, side // 6, 1))).astype(np.uint8))


def encode(image: Image.Image, form: str, **how: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **how)
    return file.getvalue()


def without_end(data: bytes, form: str) -> bytes:
    """Zeros in place of the last half, as a broken download leaves them; of formats with checksums a cut."""
    return data[: len(data) // 2] + (bytes(max(len(data) // 2, 600)) if form in ("JPEG", "WEBP", "AVIF") else b"")


def folder(path: Path, files: Callable[[int, int], tuple[str, bytes]], count: int = 12) -> Path:
    for c, name in enumerate("ab"):
        (path / name).mkdir()
        for i in range(count):
            form, data = files(c, i)
            (path / name / f"{i}.{FORMS[form]}").write_bytes(data)
    return path


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("how", ["folder", "parquet", "predict"])
def test_an_image_that_lost_its_end_is_refused_by_its_name(
    form: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a program lets Pillow fill such images, which stays as the program has set it."""
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)

    def file(c: int, i: int) -> tuple[str, bytes]:
        data = encode(picture(i + 50 * c), form)
        return form, without_end(data, form) if (c, i) == (1, 3) else data

    place = f"b/3.{FORMS[form]}"
    if how == "parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        cells = [{"bytes": file(i % 2, i // 2)[1], "path": None} for i in range(24)]
        parquet.write_table(
            pyarrow.table({"image": cells, "label": [i % 2 for i in range(24)]}), tmp_path / "a.parquet"
        )
        place = "a.parquet, row 8"
    else:
        folder(tmp_path, file)
    spec = DataSpec(path=str(tmp_path / "a.parquet" if how == "parquet" else tmp_path))
    with pytest.raises(InputError, match=place):
        _ = read_inputs(tmp_path, spec, kind="image") if how == "predict" else load_table(spec, seed=0)
    assert ImageFile.LOAD_TRUNCATED_IMAGES


def test_bytes_after_a_jpeg_and_flat_images_are_no_fault() -> None:
    whole = encode(picture(1), "JPEG")
    film = np.random.default_rng(0).integers(0, 256, 4000).astype(np.uint8).tobytes()
    for data in (whole, whole + bytes(3000), whole + b"\xff\xda" + film, encode(picture(1), "JPEG", progressive=True)):
        assert look(data).fault is None
    for form in ("JPEG", "WEBP", "AVIF"):
        assert look(encode(Image.new("RGB", (900, 700), (255, 255, 255)), form)).fault is None
    assert look(encode(picture(1), "JPEG", exif=b"Exif\0\0\xff\xd9\xff\xd9")[:-300] + bytes(300)).fault is not None


@pytest.mark.parametrize("form", ["PNG", "WEBP", "GIF", "TIFF"])
def test_frames_that_are_not_read_are_reported_for_predictions_too(form: str, tmp_path: Path) -> None:
    more = {"save_all": True, "append_images": [picture(90), picture(91)]}
    folder(tmp_path, lambda c, i: (form, encode(picture(i + 50 * c), form, **more)))
    for table in (
        load_table(DataSpec(path=str(tmp_path)), seed=0),
        read_inputs(tmp_path, DataSpec(path="x"), kind="image"),
    ):
        assert any("24 of 24 images" in n and "the first is read" in n for n in table.notices)


def test_images_of_an_unknown_format_are_named(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.heic").write_bytes(b"\0\0\0\x18ftypheic" + bytes(99))
    with pytest.raises(InputError, match=r"no images .* but 1 \.heic; expected"):
        load_table(DataSpec(path=str(tmp_path)), seed=0)


@pytest.mark.parametrize(
    ("form", "word"),
    [
        (
            lambda c: ("JPEG" if c else "PNG", 48, "RGB"),
            'their files: every image of "a" is PNG and every image of "b" is JPEG',
        ),
        (
            lambda c: ("PNG", 48 if c else 54, "RGB"),
            'size: every image of "a" is 54 x 54 and every image of "b" is 48 x 48',
        ),
        (lambda c: ("PNG", 48, "L" if c else "RGB"), 'every image of "a" is in colours and every image of "b" is grey'),
        (lambda c: ("PNG", 48, "RGB"), ""),
    ],
)
def test_classes_whose_files_differ_in_form_are_reported(
    form: Callable[[int], tuple[str, int, str]], word: str, tmp_path: Path
) -> None:
    def file(c: int, i: int) -> tuple[str, bytes]:
        name, side, mode = form(c)
        return name, encode(picture(i + 50 * c, side).convert(mode), name)

    notices = load_table(DataSpec(path=str(folder(tmp_path, file))), seed=0).notices
    assert word in "\n".join(notices) if word else notices == ()


def test_one_image_of_another_form_gives_no_notice(tmp_path: Path) -> None:
    def file(c: int, i: int) -> tuple[str, bytes]:
        form = "JPEG" if c or i == 0 else "PNG"
        return form, encode(picture(i + 50 * c), form)

    assert load_table(DataSpec(path=str(folder(tmp_path, file))), seed=0).notices == ()


# --- feature vectors --------------------------------------------------------------------------------------------------


def vectors(rows: int = 200) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 5)), rng.integers(0, 3, rows)


def notices_for(x: np.ndarray, y: np.ndarray) -> str:
    split = np.full(len(x), "train")
    return "\n".join(feature_doubts.notices(Table("features", x.astype(np.float32), y, ("a", "b", "c"), split)))


@pytest.mark.parametrize("mark", [-999, -9999, 9999, 999, 99, 1e20, -32768])
def test_a_number_that_marks_missing_values_is_reported(mark: float, tmp_path: Path) -> None:
    x, y = vectors()
    x[::20, 3] = mark
    assert f"column x[:, 3] is {mark:g} in 10 of 200 rows" in notices_for(x, y)
    np.savez(tmp_path / "a.npz", x=x[:50].astype(np.float32))  # in rows to predict, too
    found = read_inputs(tmp_path / "a.npz", DataSpec(path="x"), kind="features").notices
    assert "column x[:, 3] is" in "\n".join(found)


def test_numbers_that_mark_nothing_say_nothing() -> None:
    x, y = vectors()
    rng = np.random.default_rng(1)
    ages, amounts, once = rng.integers(0, 99, 200), rng.integers(-5000, 5000, 200), x[:, 0].copy()
    ages[:9], amounts[:9], once[0] = 99, -999, -999  # the oldest; within the range; a single one
    for column in (ages, amounts, once, np.where(y == 0, 9999, 0)):  # the last: two values
        assert notices_for(np.column_stack([x, column, -np.ones(200)]), rng.permutation(y)) == ""


def test_a_label_among_the_features_is_reported() -> None:
    x, y = vectors()
    assert "column x[:, 5] alone tells the class of each row:" in notices_for(np.column_stack([x, y]), y)
    image = np.array([7.5, -2, 3])[y]
    assert "column x[:, 5] alone tells the class of each row, as do other columns (1)" in notices_for(
        np.column_stack([x, image, y]), y
    )
    assert "columns x[:, 5] to x[:, 7] alone tell the class" in notices_for(np.column_stack([x, np.eye(3)[y]]), y)
    almost = y.copy()
    almost[0] = (y[0] + 1) % 3
    for column in (almost, y == 1, np.zeros(200)):
        assert notices_for(np.column_stack([x, column]), y) == ""
    assert notices_for(np.column_stack([x, y])[:12], y[:12]) == ""  # too few rows


def test_the_index_of_a_data_frame_is_reported() -> None:
    x, y = vectors()
    assert "column x[:, 5] numbers the rows, from 7 to 206" in notices_for(np.column_stack([x, np.arange(200) + 7]), y)
    assert "from 0 to 99" in notices_for(np.column_stack([x, np.arange(200) % 100]), y)  # of two clients
    assert notices_for(np.column_stack([x, np.sort(x[:, 0])]), y) == ""


@pytest.mark.parametrize("name", ["iris", "wine", "breast_cancer", "digits"])
def test_published_tables_say_nothing(name: str) -> None:
    import sklearn.datasets

    found = getattr(sklearn.datasets, f"load_{name}")()
    split = np.full(len(found.data), "train")
    table = Table("features", found.data.astype(np.float32), found.target, tuple(map(str, found.target_names)), split)
    assert feature_doubts.notices(table) == ()


# --- texts ------------------------------------------------------------------------------------------------------------


def words(rows: list[dict[str, Any]], path: Path, task: str | None = None) -> str:
    (path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return "\n".join(text_doubts.notices(load_table(DataSpec(path=str(path / "a.jsonl")), seed=0, task=task)))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("ein CafÃ© {}", 'signs such as "Ã©"'),
        ("Itâ€™s {}", 'signs such as "â€"'),
        ("th\ufffd {}", "U+FFFD"),
        ("{}.5", "are numbers"),
        ("b'hello {}'", "are Python's form of bytes"),
        ("/data/texts/{}.txt", "are paths of files"),
        ("https://example.org/{}", "are addresses"),
        ("0d9f3c7{}-1a2b", "are identifiers"),
        ("#REF!", "where a formula fails"),
        ("aGVsbG8gd29ybGQgdGhpcyBpcyB0ZXh0{}==", "are base64"),
        ("one\\nTwo {}", "a backslash and an n"),
        ("the \\nabla of {}", ""),
        ("São Paulo, Château, Ünal, ÂNGELA {}", ""),
        ("see https://example.org/{} and /data/a.txt", ""),
        ("3 of 4 for {} euros", ""),
        ("decade {}", ""),
    ],
)
def test_texts_that_mean_no_text_are_reported(text: str, word: str, tmp_path: Path) -> None:
    found = words([{"text": text.format(100 + i), "label": "ab"[i % 2]} for i in range(40)], tmp_path)
    assert word in found if word else found == ""


def test_texts_that_are_the_names_of_their_classes_are_reported(tmp_path: Path) -> None:
    rows = [{"text": "ab"[i % 2], "label": "ab"[i % 2]} for i in range(40)]
    assert "are the names of their classes" in words(rows, tmp_path)
    assert words([{**rows[0], "text": "b"}, *rows[1:]], tmp_path) == ""


@pytest.mark.parametrize(
    ("asked", "answer", "word"),
    [
        ("say it {}", "say it {}", "begin with their whole instruction"),
        ("what is {} and one", "what is {} and one: two", "begin with their whole instruction"),
        ("say it {}", "I cannot.", "all answers of 30 rows"),
        ("say it {}", "### Response:\nyes {}", 'marks of a chat template, such as "### Response:"'),
        ("<|im_start|>user\nsay {}<|im_end|>", "yes {}", 'such as "<|im_start|>"'),
        ("Do {{{{ what }}}} {}", "yes {}", 'hold "{{ what }}"'),
        ("say it {}", "yes {}", ""),
        ("repeat a b {}", "a b {}", ""),
        ("write a list [1] of {}", "### Heading\n<b>{}</b>", ""),
    ],
)
def test_answers_that_teach_nothing_are_reported(asked: str, answer: str, word: str, tmp_path: Path) -> None:
    rows = [{"instruction": asked.format(i), "output": answer.format(i)} for i in range(30)]
    found = words(rows, tmp_path, "instruction")
    assert word in found if word else found == ""


def test_preferences_that_contradict_each_other_are_reported(tmp_path: Path) -> None:
    def rows(exchanged: bool) -> list[dict[str, str]]:
        pairs = [("a", "b") if i % 2 or not exchanged else ("b", "a") for i in range(30)]
        return [
            {"prompt": f"say {i // 2}", "chosen": f"{a} {i // 2}", "rejected": f"{b} {i // 2}"}
            for i, (a, b) in enumerate(pairs)
        ]

    same = rows(exchanged=True)
    assert "30 of 30 rows" in (found := words(same, tmp_path, "preference"))
    assert "with the answers exchanged" in found
    assert words(rows(exchanged=False), tmp_path, "preference") == ""


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        ("Split", ("train", "test"), True),
        ("set", ("Training", "valid", "test"), True),
        ("is_test", (True, False), True),
        ("set", ("north", "south"), False),
        ("urgent", (True, False), False),
        ("phase", ("test", "test"), False),
    ],
)
def test_a_column_that_marks_splits_and_is_not_read_is_reported(
    name: str, values: tuple[Any, ...], told: bool, tmp_path: Path
) -> None:
    rows = [{"text": f"row {i}", "label": "ab"[i // 3 % 2], name: values[i % len(values)]} for i in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    spec = DataSpec(path=str(tmp_path / "a.jsonl"))
    assert told == any(f'column "{name}"' in n and "test rows" in n for n in load_table(spec, seed=0).notices)
    chosen = DataSpec(path=spec.path, where={name: (str(values[0]),)})  # a column that is used says nothing
    assert not [n for n in load_table(chosen, seed=0).notices if "seems to mark" in n]


@pytest.mark.parametrize(
    ("rare", "rows", "told"),
    [
        ("posiive", 1, True),
        ("psoitive", 2, True),
        ("positivee", 1, True),
        ("positave", 1, True),
        ("posited", 1, False),
        ("posiive", 9, False),
    ],
)
def test_a_rare_class_that_is_a_misspelt_one_is_reported(rare: str, rows: int, told: bool, tmp_path: Path) -> None:
    labels = ["positive", "negative"] * 30 + [rare] * rows
    lines = [{"text": f"row {i}", "label": label} for i, label in enumerate(labels)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    notices = load_table(DataSpec(path=str(tmp_path / "a.jsonl")), seed=0).notices
    assert told == any(f'the class "{rare}" (rows:' in n and 'from "positive"' in n for n in notices)
