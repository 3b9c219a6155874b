"""Folders whose files are rows: recordings with metadata, and images or recordings to predict."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import tiny_segformer
import tiny_seq2seq
import tiny_text
from fedfm.api.execute import run
from fedfm.api.predict import predict
from fedfm.api.prediction_files import write
from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec
from fedfm.errors import InputError

SPEECH = "sequence_to_sequence"
RECORDINGS = pytest.importorskip("soundfile") and 12


@pytest.fixture(scope="session")
def tones(tmp_path_factory):
    """Recordings in train/a, train/b and test, as ``audiofolder`` has them."""
    home = tmp_path_factory.mktemp("tones")
    rows = tiny_seq2seq.recordings(home / "made", RECORDINGS)
    for split, some in (("train", rows[:8]), ("test", rows[8:])):
        lines = [("file_name", "transcription", "speaker")]
        for i, row in enumerate(some):
            name = Path("ab"[i % 2] if split == "train" else "", f"{i}.wav")
            (home / "set" / split / name.parent).mkdir(parents=True, exist_ok=True)
            shutil.copy(home / "made" / row["audio"], home / "set" / split / name)
            lines.append((name.as_posix(), row["output"], f"s{i % 2}"))
        with (home / "set" / split / "metadata.csv").open("w", newline="") as file:
            csv.writer(file).writerows(lines)
    tiny_seq2seq.save_whisper(home / "whisper")
    return home


@pytest.fixture
def own(tones, tmp_path):
    """A copy of the folder, to be changed."""
    return Path(shutil.copytree(tones / "set", tmp_path / "set"))


def read(path, task=SPEECH, **keys):
    return load_table(DataSpec(path=str(path), output="transcription", **keys), seed=0, task=task)


def experiment(path, model, task, **data):
    return {
        "data": {"path": str(path), "partition": {"name": "iid", "clients": 2}, **data},
        "model": {"name": str(model), "task": task, "max_length": 8, "adaptation": {"name": "full"}},
        "method": {"name": "fedavg", "rounds": 1, "local": {"name": "adamw", "learning_rate": 0.01, "batch_size": 4}},
        "run": {"workers": 1},
    }


def test_recordings_are_read_with_splits_folders_and_metadata(tones):
    table = read(tones / "set")
    assert table.kind == "sequences"
    assert [len(table.rows(split)) for split in ("train", "test")] == [8, 4]
    assert {Path(audio.source).suffix for audio, _ in table.inputs} == {".wav"}
    assert set(table.columns["speaker"]) == {"s0", "s1"}
    assert set(table.columns["folder"]) == {"a", "b", ""}
    renamed = read(tones / "set", audio="sound")
    assert renamed.inputs == table.inputs


def test_metadata_in_other_forms_and_places_give_the_same_rows(tones, own):
    for split in ("train", "test"):
        table = own / split / "metadata.csv"
        with table.open() as file:
            lines = [json.dumps(row) for row in csv.DictReader(file)]
        table.with_suffix(".jsonl").write_text("\n".join(lines))
        table.unlink()
    texts = [text for _, text in read(own).inputs]
    assert texts == [text for _, text in read(tones / "set").inputs]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda home: (home / "train" / "a" / "0.wav").unlink(), 'there is no recording "a/0.wav" below'),
        (lambda home: shutil.copy(home / "test" / "0.wav", home / "test" / "9.wav"), "9.wav has no row in"),
        (lambda home: (home / "train" / "a" / "0.wav").write_bytes(b"RIFF"), "is not a recording"),
        (lambda home: shutil.copy(home / "test" / "0.wav", home / "0.wav"), "is outside .*: move it into one of them"),
        (lambda home: (home / "rows.csv").write_text("audio,output"), "rows.csv is next to folders: name this file"),
        (lambda home: (home / "tests").mkdir(), "is next to .* and is not a split"),
        (lambda home: (home / "test" / "metadata.csv").unlink(), "transcription"),
    ],
)
def test_files_without_rows_and_rows_without_files_are_refused(change, words, own):
    change(own)
    with pytest.raises(InputError, match=words) as found:
        read(own)
    assert "\n" not in str(found.value)


def test_files_of_another_kind_are_counted_and_named(own):
    (own / "train" / "a" / "notes.m4a").write_bytes(b"x")
    assert any("1 file of" in notice and "notes.m4a" in notice for notice in read(own).notices)


def test_a_folder_of_recordings_without_a_task_names_one(own):
    with pytest.raises(InputError, match=f'for recordings set model.task = "{SPEECH}"'):
        read(own, task=None)


def test_a_folder_without_any_row_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"has no recordings \(.wav, .flac, .ogg, .mp3, ...\), and no file of rows"):
        read(tmp_path)


@pytest.fixture(scope="session")
def ran(tones, tmp_path_factory):
    """Runs of three tasks whose rows are files."""
    home = tmp_path_factory.mktemp("ran")
    run(experiment(tones / "set", tones / "whisper", SPEECH, output="transcription"), home / "speech")
    from transformers import ViTConfig, ViTImageProcessor, ViTModel

    torch.manual_seed(3)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    ViTModel(ViTConfig(**shape, image_size=16, patch_size=8)).save_pretrained(home / "vit")
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(home / "vit")
    (home / "pairs").mkdir()
    rng = np.random.default_rng(0)
    for i in range(8):
        for name in "ab":
            Image.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(home / "pairs" / f"{i}{name}.png")
    rows = [{"left": f"{i}a.png", "positive": f"{i}b.png"} for i in range(8)]
    (home / "pairs" / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run(experiment(home / "pairs", home / "vit", "embedding", anchor="left"), home / "embedding")
    tiny_segformer.folder(home / "shapes", {"train": 6, "test": 2})
    tiny_segformer.save(home / "segformer", classes=3)
    run(experiment(home / "shapes", home / "segformer", "segmentation"), home / "segmentation")
    for i in range(4):
        (home / "kinds" / "xy"[i % 2]).mkdir(parents=True, exist_ok=True)
        shutil.copy(home / "pairs" / f"{i}a.png", home / "kinds" / "xy"[i % 2])
    run(experiment(home / "kinds", home / "vit", "classification", test_fraction=0.5), home / "classification")
    return home


KEYS = {"embedding": "embeddings", "segmentation": "masks", "classification": "predictions"}


@pytest.mark.parametrize("task", KEYS)
def test_a_folder_of_images_is_predicted_for_each_task_of_images(task, ran, tmp_path):
    (tmp_path / "new" / "more").mkdir(parents=True)
    for name, place in (("0a.png", "one.png"), ("1a.png", "more/two.png")):
        shutil.copy(ran / "pairs" / name, tmp_path / "new" / place)
    found = predict(ran / task, tmp_path / "new", files=tmp_path / "files")
    assert sorted(found["files"]) == ["more/two.png", "one.png"]
    assert len(found[KEYS[task]]) == 2
    write(found, tmp_path / "found.csv")
    with (tmp_path / "found.csv").open() as file:
        assert {row["file"] for row in csv.DictReader(file)} == {"more/two.png", "one.png"}


def test_images_of_a_folder_have_the_vectors_of_the_same_images_in_a_table(ran, tmp_path):
    for i in range(3):
        shutil.copy(ran / "pairs" / f"{i}a.png", tmp_path)
    alone = predict(ran / "embedding", tmp_path)
    listed = predict(ran / "embedding", ran / "pairs")
    assert alone["embeddings"] == listed["embeddings"][:3]
    assert listed["files"] == [f"{i}a.png" for i in range(8)]


def test_a_folder_of_recordings_is_predicted(ran, tones, tmp_path):
    (tmp_path / "new").mkdir()
    for i in range(2):
        shutil.copy(tones / "set" / "test" / f"{i}.wav", tmp_path / "new")
    found = predict(ran / "speech", tmp_path / "new")
    assert found["files"] == ["0.wav", "1.wav"]
    assert len(found["answers"]) == 2
    write(found, tmp_path / "found.csv")
    with (tmp_path / "found.csv").open() as file:
        assert [row["file"] for row in csv.DictReader(file)] == ["0.wav", "1.wav"]


def test_texts_in_a_folder_of_tables_are_no_files(tmp_path):
    rows = [{"text": f"small grey {kind}", "label": kind} for kind in ("fish", "bird")] * 4
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tiny_text.save_bert(tmp_path / "bert")
    run(experiment(tmp_path / "texts", tmp_path / "bert", "classification"), tmp_path / "run")
    assert "files" not in predict(tmp_path / "run", tmp_path / "texts")
