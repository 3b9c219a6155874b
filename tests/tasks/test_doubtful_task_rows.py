"""What is read in another way than its author may mean is said before a run, for the rows of every task."""

import json

import numpy as np
import pytest
from PIL import Image

from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec
from fedfm.errors import InputError
from fedfm.tasks import _pair_notices, _tagged_rows
from fedfm.tasks._tagged_rows import sheet_of


def load(task, path, **keys):
    return load_table(DataSpec(path=str(path), **keys), seed=0, task=task)


def jsonl(folder, rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def texts_with(folder, targets):
    return load("regression", jsonl(folder, [{"text": f"row {i}", "label": v} for i, v in enumerate(targets)]))


# --- pictures ---------------------------------------------------------------------------------------------------------


def folder_of(task, folder, picture):
    """Rows of a task whose every image is this picture."""
    pictures = folder / "images"
    pictures.mkdir()
    names = [f"{i}.png" for i in range(4)]
    for name in names:
        picture.save(pictures / name)
    paths = [f"images/{name}" for name in names]
    if task == "segmentation":
        (folder / "masks").mkdir()
        for i, name in enumerate(names):
            Image.fromarray(np.eye(8, dtype=np.uint8) * (i % 2)).save(folder / "masks" / name)
        return folder
    if task == "embedding":
        return jsonl(folder, [{"anchor": a, "positive": b} for a, b in zip(paths, paths[1:] + paths[:1], strict=True)])
    if task == "visual_instruction":
        said = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "that"}]
        return jsonl(folder, [{"messages": said, "images": [path]} for path in paths])
    marks = {"regression": [1, 2, 3, 4], "multi_label": ["a;b", "a", "b", "a"]}.get(task, ["a", "b", "a", "b"])
    lines = "".join(f"{name},{mark}\n" for name, mark in zip(names, marks, strict=True))
    (pictures / "metadata.csv").write_text(f"file_name,label\n{lines}")
    return pictures


PICTURED = (
    "classification",
    "zero_shot",
    "regression",
    "multi_label",
    "segmentation",
    "embedding",
    "visual_instruction",
)


@pytest.mark.parametrize("task", PICTURED)
def test_every_task_says_what_is_changed_in_its_pictures(task, tmp_path):
    clear = np.full((8, 8, 4), 200, np.uint8)
    clear[:4, :, 3] = 0
    table = load(task, folder_of(task, tmp_path, Image.fromarray(clear)))
    assert any("transparent pixels, which are laid over white" in text for text in table.notices)


def with_palettes(folder, palettes):
    for part in ("images", "masks"):
        (folder / part).mkdir(parents=True)
    for i, palette in enumerate(palettes):
        Image.new("RGB", (8, 8), (40 * i, 0, 0)).save(folder / "images" / f"{i}.png")
        mask = Image.fromarray(np.eye(8, dtype=np.uint8), mode="P")
        mask.putpalette(palette)
        mask.save(folder / "masks" / f"{i}.png")
    return load("segmentation", folder)


def test_palettes_that_give_a_number_two_colours_are_named(tmp_path):
    red, blue = [0, 0, 0, 255, 0, 0], [0, 0, 0, 0, 0, 255]
    assert not with_palettes(tmp_path / "one", [red, red]).notices
    (said,) = with_palettes(tmp_path / "two", [red, blue]).notices
    assert "the number 1 has the colour (255, 0, 0)" in said
    assert "(0, 0, 255) in that of" in said
    unused = [*red, 1, 2, 3]  # a colour that no pixel has says nothing
    assert not with_palettes(tmp_path / "three", [red, unused]).notices


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", [-999, 9999, -9, 1e20])
def test_numbers_that_mark_missing_targets_are_named(mark, tmp_path):
    (said,) = texts_with(tmp_path, [mark, mark, mark, *np.linspace(0, 3, 20)]).notices
    assert f"is {mark:g} in 3 of 23 rows" in said


def test_a_number_far_from_all_others_is_named(tmp_path):
    (said,) = texts_with(tmp_path, [1e9, *np.linspace(0, 3, 40)]).notices
    assert "numbers such as 1e+09" in said


@pytest.mark.parametrize(
    "numbers",
    [
        np.random.default_rng(0).lognormal(10, 1.5, 200).round(2),
        [0] * 60 + [1, 2, 9],
        np.arange(40) - 20,
        np.linspace(990, 1010, 50).round(),
    ],
)
def test_usual_targets_are_not_doubted(numbers, tmp_path):
    assert not texts_with(tmp_path, np.asarray(numbers).tolist()).notices


# --- pairs, tags and inputs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["label", "score", "is_duplicate"])
def test_a_column_that_judges_pairs_is_named(column, tmp_path):
    pairs = [{"anchor": f"a {i}", "positive": f"b {i}", column: i % 2} for i in range(6)]
    assert any("counts as a pair that belongs together" in t for t in load("embedding", jsonl(tmp_path, pairs)).notices)
    alike = [pair | {column: 1} for pair in pairs]
    assert not load("embedding", jsonl(tmp_path, alike)).notices


def test_negatives_that_are_their_anchor_or_positive_are_counted(tmp_path):
    pairs = [{"anchor": f"a {i}", "positive": f"b {i}", "negative": ("n", "a 1", "b 2")[i % 3]} for i in range(6)]
    said = _pair_notices._repetitions(load("embedding", jsonl(tmp_path, pairs)))
    assert said == ["2 of 6 training rows have a negative that is equal to their anchor or positive"]


def test_tags_without_a_prefix_among_tags_with_one_are_named(tmp_path, monkeypatch):
    rows = [{"tokens": ["x", "y"], "tags": tags} for tags in (["B-AN", "O"], ["0", "I-AN"], ["O", "O"])]
    monkeypatch.setattr(_tagged_rows.word_tokens, "of", lambda words, tools: type("P", (), {"places": words}))
    (said,) = _tagged_rows.forewarnings({"training": load("token_classification", jsonl(tmp_path, rows))}, None)
    assert '"0" have none' in said


@pytest.mark.parametrize("column", ["input", "context", "system"])
def test_a_short_column_that_extends_an_input_is_named(column, tmp_path):
    rows = [{"instruction": f"translate {i}", "output": "x", column: "fish"} for i in range(4)]
    assert any(f'column "{column}"' in t for t in load("sequence_to_sequence", jsonl(tmp_path, rows)).notices)
    assert not load("sequence_to_sequence", jsonl(tmp_path, [row | {column: ""} for row in rows])).notices


@pytest.mark.parametrize("mark", ["101", "1 0 1", "1,0,1", "1-0-1"])
def test_texts_of_zeros_and_ones_are_no_names_of_labels(mark, tmp_path):
    rows = [
        {"text": f"row {i}", "label": (mark, mark[::-1].replace("1", "x").replace("0", "1").replace("x", "0"))[i % 2]}
        for i in range(6)
    ]
    said = load("multi_label", jsonl(tmp_path, rows)).notices
    assert any("a 0 or 1 for each label" in text for text in said)
    named = [row | {"label": ("a", "b")[i % 2]} for i, row in enumerate(rows)]
    assert not any("a 0 or 1" in text for text in load("multi_label", jsonl(tmp_path, named)).notices)


@pytest.mark.parametrize("cell", ["{'a', 'b'}", "('a', 'b')", "['a', 'b']", '{"a": 1}'])
def test_labels_as_python_writes_them_are_refused(cell, tmp_path):
    rows = [{"text": f"row {i}", "label": ("b (early)", cell)[i % 2]} for i in range(6)]
    with pytest.raises(InputError, match=r"line 2: .* a list that is not JSON"):
        load("multi_label", jsonl(tmp_path, rows))


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_a_column_that_counts_words_is_not_read_as_the_words(start, width, tmp_path):
    words, more = ["in", "1", "Rome"], ["x", "B-LOC"][4 - width :]
    lines = ["\t".join((str(i + start), word, *more)) for i, word in enumerate(words)]
    path = tmp_path / "rows.conll"
    path.write_text("\n".join([*lines, "", *lines[:2], ""]))
    found = sheet_of(path.read_text(), str(path))
    assert found.columns["tokens"] == [words, words[:2]]
    assert found.columns.get("tags") == ([["B-LOC"] * 3, ["B-LOC"] * 2] if width > 2 else None)
    plain = "1 O\n2 O\n\nRome O\n"
    assert sheet_of(plain, "plain").columns["tokens"] == [["1", "2"], ["Rome"]]


def test_entities_of_two_notations_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(_tagged_rows.word_tokens, "of", lambda words, tools: type("P", (), {"places": words}))

    def notation_notices(*sentences):
        rows = [{"tokens": ["x", "y", "z"], "tags": tags} for tags in (*sentences, ["O", "O", "O"])]
        table = load("token_classification", jsonl(tmp_path, rows))
        return [t for t in _tagged_rows.forewarnings({"training": table}, None) if "two notations" in t]

    bio, bioes, bilou = ["B-P", "I-P", "O"], ["B-P", "E-P", "S-P"], ["B-P", "L-P", "U-P"]
    assert not any(map(notation_notices, (bio, bioes, bilou)))
    (text,) = notation_notices(bio, bilou)
    assert text.startswith("2 of 3 entities")


# --- texts that show nothing, and recordings --------------------------------------------------------------------------

SAID = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "that"}]
SHOWN = {
    "classification": {"text": "fish", "label": "a"},
    "language_modelling": {"text": "fish"},
    "instruction": {"instruction": "say", "output": "fish"},
    "preference": {"prompt": "say", "chosen": "fish", "rejected": "bird"},
    "sequence_to_sequence": {"instruction": "say", "output": "fish"},
    "embedding": {"anchor": "fish", "positive": "bird"},
}


@pytest.mark.parametrize(("task", "column"), [(t, c) for t, row in SHOWN.items() for c in row if c != "label"])
@pytest.mark.parametrize("nothing", ["\u200b", " \u2060\ufeff ", "\u3164"])
def test_a_text_of_invisible_characters_is_empty(task, column, nothing, tmp_path):
    rows = [SHOWN[task] | {"label": "ab"[i % 2]} if task == "classification" else SHOWN[task] for i in range(4)]
    load(task, jsonl(tmp_path, rows))
    with pytest.raises(InputError, match=r"line 2.* is empty"):
        load(task, jsonl(tmp_path, [rows[0], rows[1] | {column: nothing}, *rows[2:]]))


def test_a_message_and_a_word_of_invisible_characters_are_empty(tmp_path):
    said = [SAID[0], SAID[1] | {"content": "\u200b"}]
    with pytest.raises(InputError, match=r"message 2 .* is empty"):
        load("instruction", jsonl(tmp_path, [{"messages": SAID}, {"messages": said}]))
    with pytest.raises(InputError, match="not empty"):
        load("token_classification", jsonl(tmp_path, [{"tokens": ["a", "\u200b"], "tags": ["O", "O"]}] * 2))


def spoken(folder, sounds, **how):
    """Rows of recordings: samples (n,) or (n, channels), or the bytes of a file."""
    soundfile = pytest.importorskip("soundfile")
    pytest.importorskip("soxr")
    for i, sound in enumerate(sounds):
        path = folder / f"{i}.wav"
        if isinstance(sound, bytes):
            path.write_bytes(sound)
        else:
            soundfile.write(path, sound, 16_000, **how)
    rows = [{"audio": f"{i}.wav", "output": "red"} for i in range(len(sounds))]
    return load("sequence_to_sequence", jsonl(folder, rows))


NOISE = np.random.default_rng(0).uniform(-0.1, 0.1, 8000).astype(np.float32)


def test_a_damaged_recording_is_refused_when_it_is_read(tmp_path):
    spoken(tmp_path, [NOISE, NOISE])
    whole = (tmp_path / "0.wav").read_bytes()
    assert not spoken(tmp_path, [NOISE, whole[:4] + b"\xff" * 4 + whole[8:]]).notices  # a stream, without a length
    assert not spoken(tmp_path, [NOISE, whole[:-1]]).notices
    with pytest.raises(InputError, match=r"line 2: column .audio.: .*1.wav is cut: \d+ bytes are missing"):
        spoken(tmp_path, [NOISE, whole[: len(whole) // 2]])
    with pytest.raises(InputError, match=r"line 2: .*1.wav holds numbers that are not finite"):
        spoken(tmp_path, [NOISE, NOISE * np.nan], subtype="FLOAT")


def test_recordings_without_sound_are_named(tmp_path):
    cancelled = np.stack([NOISE, -NOISE], 1)
    (said,) = spoken(tmp_path, [NOISE, 0 * NOISE, cancelled]).notices
    assert said.startswith("2 of 3 recordings of ")
    assert "1.wav" in said


def test_channels_that_cancel_each_other_are_named(tmp_path):
    """An inverted channel leaves a small rest of the sound; a silent channel leaves half of it."""
    inverted, silent, same = (np.stack([NOISE, factor * NOISE], 1) for factor in (-0.9, 0, 1))
    (said,) = spoken(tmp_path, [silent, inverted, same, 0.01 * NOISE]).notices
    assert said.startswith("1 of 4 recordings of ")
    assert "lose most of their sound" in said
    assert "1.wav" in said
