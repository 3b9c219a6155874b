"""Recordings as rows: decoding against soundfile and soxr, what is said and refused, runs and exports of a Whisper."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import tiny_seq2seq as tiny
from fedfm.api.execute import run
from fedfm.api.predict import export, predict
from fedfm.core.attachments import Attachment
from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec
from fedfm.data.table import fingerprint
from fedfm.errors import InputError, MissingExtra
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.tasks import _recordings
from small import jsonl

TASK = "sequence_to_sequence"


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """A folder with recordings of tones in spoken.jsonl, and a Whisper that hears one second."""
    folder = tmp_path_factory.mktemp("recordings")
    jsonl(folder / "spoken.jsonl", tiny.recordings(folder, 24))
    tiny.save_whisper(folder / "whisper")
    return folder


@pytest.fixture(scope="session")
def whisper(place):
    spec = ModelSpec(str(place / "whisper"), max_length=12, adaptation=AdaptationSpec("full"))
    return load_model(spec, classes=(), kind="sequences", task=TASK)


def load(path, **keys):
    return load_table(DataSpec(path=str(path), **keys), seed=0)  # the columns imply the task


def row(path, output="red", **more):
    return {"audio": str(path), "output": output, **more}


# --- decoding ---------------------------------------------------------------------------------------------------------


def test_a_recording_is_its_mean_channel_at_the_model_s_rate(tmp_path):
    import soundfile
    import soxr

    rng = np.random.default_rng(0)
    both = (rng.uniform(-0.5, 0.5, (4410, 2))).astype(np.float32)
    soundfile.write(tmp_path / "two.flac", both, 44_100, subtype="PCM_24")
    found = _recordings.sound(Attachment(str(tmp_path / "two.flac")), 16_000, 30)
    stored, _ = soundfile.read(tmp_path / "two.flac", dtype="float32")
    np.testing.assert_allclose(found, soxr.resample(stored.mean(1), 44_100, 16_000), atol=1e-6)
    assert len(found) == 1600
    content = Attachment((tmp_path / "two.flac").read_bytes())
    np.testing.assert_array_equal(_recordings.sound(content, 16_000, 30), found)
    short = _recordings.sound(content, 44_100, 0.01)
    np.testing.assert_allclose(short, stored.mean(1)[:441], atol=1e-6)


def test_features_are_those_of_the_feature_extractor(place, whisper):
    import soundfile

    table = load(place / "spoken.jsonl")
    rows = whisper.prepare(table, [0, 5])
    sounds = [soundfile.read(place / f"wav/{i}.wav", dtype="float32")[0] for i in (0, 5)]
    theirs = whisper.tools.processor(sounds, sampling_rate=16_000, return_tensors="pt").input_features
    torch.testing.assert_close(rows.tensors["input_features"], theirs, rtol=1e-5, atol=1e-5)


def test_features_that_exceed_memory_are_computed_by_batch(place, whisper, monkeypatch):
    table = load(place / "spoken.jsonl")
    known = whisper.prepare(table, range(4))
    monkeypatch.setattr("fedfm.models.images.AT_ONCE", 1000)
    rows = whisper.prepare(table, range(4))
    assert rows.deferred
    assert not known.deferred
    batch = rows.batch([2, 0])
    torch.testing.assert_close(batch["input_features"], known.tensors["input_features"][[2, 0]])
    assert torch.equal(batch["targets"], known.tensors["targets"][[2, 0]])
    assert whisper.evaluate(rows) == whisper.evaluate(known)
    assert rows.sha256() != rows.take([1, 0, 2, 3]).sha256()


# --- files ------------------------------------------------------------------------------------------------------------


def test_csv_jsonl_and_the_hub_s_objects_are_the_same_rows(tmp_path):
    made = tiny.recordings(tmp_path, 4)
    tables = [load(jsonl(tmp_path / "rows.jsonl", made), test_fraction=0)]
    lines = ["audio,output", *(f"{of['audio']},{of['output']}" for of in made)]
    (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")
    tables.append(load(tmp_path / "rows.csv", test_fraction=0))
    objects = [{"bytes": (tmp_path / of["audio"]).read_bytes(), "path": of["audio"]} for of in made]
    columns = {"audio": objects, "output": [of["output"] for of in made]}
    (tmp_path / "elsewhere").mkdir()
    pq.write_table(pa.table(columns), tmp_path / "elsewhere" / "rows.parquet")
    tables.append(load(tmp_path / "elsewhere" / "rows.parquet", test_fraction=0))
    assert len({fingerprint(table) for table in tables}) == 1
    assert all(table.kind == "sequences" for table in tables)


def test_a_data_set_of_the_hub_keeps_its_files(tmp_path):
    import datasets

    made = tiny.recordings(tmp_path, 4)
    objects = [{"bytes": (tmp_path / of["audio"]).read_bytes(), "path": of["audio"]} for of in made]
    stored = datasets.Dataset.from_dict({"audio": objects, "output": [of["output"] for of in made]})
    stored.cast_column("audio", datasets.Audio()).save_to_disk(tmp_path / "set")
    table = load_table(DataSpec(hub=str(tmp_path / "set"), test_fraction=0), seed=0)
    assert fingerprint(table) == fingerprint(load(jsonl(tmp_path / "rows.jsonl", made), test_fraction=0))


def wrong_files(folder):
    """Wrong recordings by name, with the words of the refusal."""
    (folder / "text.wav").write_text("this is not a sound")
    tiny.tone(folder / "good.wav", (300.0,))
    (folder / "cut.wav").write_bytes((folder / "good.wav").read_bytes()[:20])
    tiny.tone(folder / "empty.wav", (300.0,), seconds=0.0)
    return {
        "no file": ("absent.wav", "there is no file .*absent.wav"),
        "no sound": ("text.wav", "is not a recording"),
        "half a header": ("cut.wav", "is not a recording|is an empty recording"),
        "nothing in it": ("empty.wav", "is an empty recording"),
        "a number": (3, "the path of a recording is expected"),
        "nothing": (None, "the path of a recording is expected"),
    }


def test_wrong_recordings_are_refused_with_their_place(tmp_path):
    for what, (name, words) in wrong_files(tmp_path).items():
        rows = [row("good.wav"), {"audio": name, "output": "red"}]
        with pytest.raises(InputError, match=f"line 2: .*({words})") as refusal:
            load(jsonl(tmp_path / "rows.jsonl", rows))
        assert "\n" not in str(refusal.value), what


def test_numbers_that_are_not_finite_are_refused(tmp_path):
    import soundfile

    soundfile.write(tmp_path / "nan.wav", np.full(1600, np.nan, np.float32), 16_000, subtype="FLOAT")
    with pytest.raises(InputError, match=r"nan\.wav holds numbers that are not finite"):
        load(jsonl(tmp_path / "rows.jsonl", [row("nan.wav")] * 2), test_fraction=0)
    with pytest.raises(InputError, match=r"nan\.wav holds numbers that are not finite"):  # a file may change later
        _recordings.sound(Attachment(str(tmp_path / "nan.wav")), 16_000, 30)


def test_cut_resampled_and_mixed_recordings_are_reported(tmp_path, whisper):
    tiny.tone(tmp_path / "long.wav", (300.0,), seconds=1.5)
    tiny.tone(tmp_path / "slow.wav", (300.0,), rate=8000)
    tiny.tone(tmp_path / "two.wav", (300.0,), channels=2, rate=44_100)
    rows = [row("long.wav"), row("slow.wav"), row("two.wav")]
    table = load(jsonl(tmp_path / "rows.jsonl", rows), test_fraction=0)
    found = "\n".join(whisper.task.forewarnings({"training": table}, whisper.tools))
    assert "recordings of 1 of 3 training rows are longer than the 1 s that the model reads" in found
    assert "of 3 recordings, 1 of 8000 Hz, 1 of 44100 Hz are resampled to 16000 Hz" in found
    assert "1 of 3 recordings have several channels" in found


@pytest.mark.parametrize("library", ["soundfile", "soxr"])
def test_a_missing_library_names_its_extra(library, tmp_path, monkeypatch):
    recording = Attachment(str(tiny.tone(tmp_path / "a.wav", (300.0,), rate=8000)))
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtra, match=rf"recordings need {library}: pip install \"fedfm\[audio\]\""):
        _recordings.sound(recording, 16_000, 30)


def test_an_extractor_of_another_model_is_refused(place, tmp_path):
    folder = shutil.copytree(place / "whisper", tmp_path / "whisper")
    said = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(said | {"feature_size": 128}))
    with pytest.raises(InputError, match=r"makes 128 mel bins and 100 frames .* the model reads 80 and 100"):
        load_model(ModelSpec(str(folder)), classes=(), kind="sequences", task=TASK)


# --- runs and exports -------------------------------------------------------------------------------------------------


def tables(place, **changed):
    """An experiment on the tones; a key such as ``method__rounds`` changes one value."""
    made = {
        "data": {"path": str(place / "spoken.jsonl"), "partition": {"name": "iid", "clients": 2}},
        "model": {"name": str(place / "whisper"), "max_length": 8, "adaptation": {"name": "lora", "rank": 4}},
        "method": {"name": "fedavg", "rounds": 1, "local": {"name": "adamw", "learning_rate": 0.02, "batch_size": 6}},
        "run": {"seed": 1, "workers": 1},
    }
    for key, value in changed.items():
        table, _, inner = key.partition("__")
        made[table][inner] = value
    return made


def sounds_of(place, count):
    """The first recordings, at the rate of a Whisper."""
    return [_recordings.sound(Attachment(str(place / f"wav/{i}.wav")), 16_000, 1) for i in range(count)]


@pytest.mark.proof
def test_a_whisper_learns_tones_and_an_export_gives_its_answers(place, tmp_path):
    from transformers import AutoFeatureExtractor, AutoModelForSpeechSeq2Seq, AutoTokenizer

    made = tables(place, method__rounds=6, model__adaptation={"name": "full"})
    made["method"]["local"]["epochs"] = 6
    result = run(made, tmp_path / "run")
    # How many it learns depends on the processor's rounding; an answer without an end has more errors than all words.
    assert result["accuracy"] > 0.5
    asked = jsonl(place / "asked.jsonl", [{"audio": f"wav/{i}.wav"} for i in range(4)])
    found = predict(tmp_path / "run", asked)
    assert len(found["cut"]) <= 1
    export(tmp_path / "run", "hf", tmp_path / "hf")
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "pipeline_tag: automatic-speech-recognition" in card
    assert "AutoFeatureExtractor" in card
    model = AutoModelForSpeechSeq2Seq.from_pretrained(tmp_path / "hf")
    extractor, tokenizer = (auto.from_pretrained(tmp_path / "hf") for auto in (AutoFeatureExtractor, AutoTokenizer))
    said = model.generate(**extractor(sounds_of(place, 4), sampling_rate=16_000, return_tensors="pt"))
    assert tokenizer.batch_decode(said, skip_special_tokens=True) == found["answers"]


def test_the_pipeline_of_transformers_gives_the_answers_of_a_whisper_of_languages(place, tmp_path):
    from transformers import pipeline

    tiny.save_whisper(place / "languages", languages=True)
    made = tables(place, model__name=str(place / "languages"), model__source_language="german", model__answer_tokens=5)
    run(made, tmp_path / "run")
    asked = jsonl(place / "asked.jsonl", [{"audio": f"wav/{i}.wav"} for i in range(4)])
    found = predict(tmp_path / "run", asked)
    export(tmp_path / "run", "hf", tmp_path / "hf")
    recognise = pipeline("automatic-speech-recognition", model=str(tmp_path / "hf"), device="cpu")
    assert recognise.model.generation_config.num_beams == 1  # the pipeline's own number is 5
    assert [recognise(sound)["text"] for sound in sounds_of(place, 4)] == found["answers"]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT on transformers 5
def test_an_adapter_of_a_whisper_loads_by_peft(place, tmp_path):
    from peft import AutoPeftModel, PeftModel
    from transformers import WhisperForConditionalGeneration

    run(tables(place), tmp_path / "run")
    asked = jsonl(place / "asked.jsonl", [{"audio": f"wav/{i}.wav"} for i in range(3)])
    found = predict(tmp_path / "run", asked)
    export(tmp_path / "run", "peft", tmp_path / "peft")
    base = WhisperForConditionalGeneration.from_pretrained(tmp_path / "peft" / "base")
    theirs = PeftModel.from_pretrained(base, tmp_path / "peft")
    from transformers import AutoFeatureExtractor, AutoTokenizer

    extractor = AutoFeatureExtractor.from_pretrained(tmp_path / "peft")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "peft")
    features = extractor(sounds_of(place, 3), sampling_rate=16_000, return_tensors="pt").input_features
    said = theirs.generate(input_features=features)
    assert tokenizer.batch_decode(said, skip_special_tokens=True) == found["answers"]
    assert theirs(input_features=features, labels=said).loss.isfinite()
    assert AutoPeftModel.from_pretrained(tmp_path / "peft").generate(input_features=features).equal(said)


@pytest.mark.proof
@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="espeak-ng, which speaks the words, is not installed")
def test_a_whisper_learns_words_that_espeak_speaks(place, tmp_path):
    words = ("red", "fish", "blue", "bird")
    rows = []
    for i in range(48):
        said, speed, pitch = words[i % 4], 140 + 10 * (i // 4 % 4), 30 + 10 * (i // 16)
        file = tmp_path / f"{i}.wav"
        voice = ["espeak-ng", "-v", "en", "-s", str(speed), "-p", str(pitch), "-w", str(file), said]
        subprocess.run(voice, check=True, capture_output=True)
        rows.append({"audio": file.name, "output": said})
    made = tables(place, method__rounds=10, model__adaptation={"name": "full"})
    made["data"]["path"] = str(jsonl(tmp_path / "rows.jsonl", rows))
    made["method"]["local"]["epochs"] = 2
    result = run(made, tmp_path / "run")
    assert result["details"]["wer"] < 0.5
