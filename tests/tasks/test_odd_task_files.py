"""Files of tasks that were once read wrongly without a notice."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import tiny_text
from fedfm.core import tasks
from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec
from fedfm.data.table import Table
from fedfm.errors import InputError
from fedfm.models.load import load_model
from fedfm.models.spec import ModelSpec
from fedfm.tasks._masked_rows import forewarnings as forewarnings_of_masks
from fedfm.tasks._tagged_rows import forewarnings

SENTENCES = [[("Anna", "B-PER"), ("Smith", "I-PER"), (f"ran{i}", "O")] for i in range(12)]


def conll(path: Path, end: str = "\n", sentences: list[list[tuple[str, str]]] = SENTENCES) -> Table:
    path.write_bytes((end * 2).join(end.join(" ".join(pair) for pair in of) for of in sentences).encode())
    return load_table(DataSpec(path=str(path), test_fraction=0.0), seed=0, task="token_classification")


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_every_end_of_a_line_ends_a_word(end: str, tmp_path: Path) -> None:
    table = conll(tmp_path / "a.conll", end)
    assert table.inputs == [tuple(zip(*of, strict=True)) for of in SENTENCES]
    assert not table.notices


def test_tags_before_words_are_doubted(tmp_path: Path) -> None:
    table = conll(tmp_path / "a.conll", sentences=[[(tag, word) for word, tag in of] for of in SENTENCES])
    assert any("14 different entries, and the column of words 3" in text for text in table.notices)


def test_types_of_entities_that_differ_by_case_are_named(tmp_path: Path) -> None:
    """B-PER and I-Per are not two spellings of a tag, but no entity has both."""
    spec = ModelSpec(str(tiny_text.save_bert(tmp_path / "bert")), max_length=8)
    classes = ("O", "B-PER", "I-PER")
    model = load_model(spec, classes=classes, kind="tagged", task=tasks.find("token_classification"))
    mixed = [[(word, tag.replace("I-PER", "I-Per")) for word, tag in of] for of in SENTENCES]
    for sentences, wrong in ((SENTENCES, False), (mixed, True)):
        found = forewarnings({"training": conll(tmp_path / "a.conll", sentences=sentences)}, model.tools)
        assert any('types "PER" and "Per" differ only by case' in text for text in found) == wrong


def test_blanks_after_a_separator_of_labels_are_no_spellings(tmp_path: Path) -> None:
    rows = [{"text": f"w{i}", "label": ["a; b", "b;a", "b"][i % 3]} for i in range(12)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = load_table(DataSpec(path=str(tmp_path / "a.jsonl"), test_fraction=0.0), seed=0, task="multi_label")
    assert table.classes == ("a", "b")
    assert not any("blanks at their ends" in text for text in table.notices)


def test_answers_that_differ_by_blanks_teach_nothing(tmp_path: Path) -> None:
    rows = [{"prompt": f"q {i}", "chosen": f"a b {i}", "rejected": f"a  b {i} "} for i in range(4)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = load_table(DataSpec(path=str(tmp_path / "a.jsonl"), test_fraction=0.0), seed=0, task="preference")
    assert any("in 4 of 4 rows, chosen and rejected are the same answer" in text for text in table.notices)


def masked(folder: Path, numbers: list[np.ndarray], names: str = "") -> Table:
    for i, mask in enumerate(numbers):
        for name, of in (("images", np.random.default_rng(i).integers(0, 256, (4, 4, 3))), ("masks", mask)):
            file = folder / name / f"{i}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(of.astype(np.uint8)).save(file)
    if names:
        (folder / "classes.json").write_text(names, encoding="utf-8-sig")
    return load_table(DataSpec(path=str(folder), test_fraction=0.0), seed=0, task="segmentation")


def test_masks_of_0_and_255_next_to_masks_of_classes_are_named(tmp_path: Path) -> None:
    """Their second class was left out as pixels that do not count."""
    half = np.eye(4)
    table = masked(tmp_path, [half, 255 * half, half])
    assert any("1 of 3 masks" in text and "hold only 0 and 255" in text for text in table.notices)
    mixed = half.copy()
    mixed[0, 1] = 255
    assert not masked(tmp_path / "void", [half, mixed]).notices


def test_masks_of_one_class_are_named(tmp_path: Path) -> None:
    table = masked(tmp_path, [np.zeros((4, 4))] * 3)
    said = forewarnings_of_masks({"training": table}, 255)
    assert said == ['all pixels of the training masks are of "0": there is nothing to distinguish']


def test_a_number_with_two_names_is_refused(tmp_path: Path) -> None:
    assert masked(tmp_path, [np.eye(4)], '{"0": "ground", "1": "tree"}').classes == ("ground", "tree")
    with pytest.raises(InputError, match='the key "1" occurs 2 times'):
        masked(tmp_path, [np.eye(4)], '{"0": "ground", "1": "tree", "1": "house"}')


@pytest.mark.parametrize(
    ("scale", "length", "what"),
    [(0.5, 8000, ""), (20_000.0, 8000, "have samples beyond 2"), (0.5, 100, "are shorter than 0.05 s")],
)
def test_recordings_that_are_hardly_speech_are_named(scale: float, length: int, what: str, tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile")
    for i in range(3):
        tone = scale * np.sin(np.arange(length) * (0.1 + 0.01 * i))
        soundfile.write(tmp_path / f"{i}.wav", tone, 16_000, subtype="FLOAT")
    (tmp_path / "metadata.csv").write_text("file_name,output\n" + "".join(f"{i}.wav,word {i}\n" for i in range(3)))
    table = load_table(DataSpec(path=str(tmp_path), test_fraction=0.0), seed=0, task="sequence_to_sequence")
    assert [what in text for text in table.notices if "recordings" in text] == ([True] if what else [])


@pytest.mark.parametrize("form", ["JPEG", "PNG", "TIFF"])
@pytest.mark.parametrize("orientation", [1, 2, 3, 4])
def test_masks_that_are_not_turned_with_their_images_are_named(form: str, orientation: int, tmp_path: Path) -> None:
    """These orientations keep width and height, so that sizes do not tell whether a mask fits."""

    def has_notice(*, masks_too: bool) -> bool:
        for name in ("images", "masks"):
            (tmp_path / name).mkdir(exist_ok=True)
        for i in range(3):
            exif = Image.Exif()
            exif[0x0112] = orientation
            image = Image.fromarray(np.random.default_rng(i).integers(0, 256, (8, 8, 3)).astype(np.uint8))
            image.save(tmp_path / "images" / f"{i}.{form.lower()}", form, exif=exif)
            mask = Image.fromarray(np.eye(8, dtype=np.uint8))
            mask.save(tmp_path / "masks" / f"{i}.png", exif=exif if masks_too else None)
        table = load_table(DataSpec(path=str(tmp_path)), seed=0, task="segmentation")
        return any("3 of 3 images" in text and "their masks have none" in text for text in table.notices)

    assert has_notice(masks_too=False) == (orientation > 1)
    assert not has_notice(masks_too=True)
