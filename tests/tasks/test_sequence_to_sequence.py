"""Sequence to sequence: loss and Seq2SeqTrainer of transformers, greedy answers by hand, scores by jiwer and
rouge-score, refusals, runs and exports. Recordings have a file of their own.
"""

import json
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny_seq2seq as tiny
from fedfm.api.execute import run
from fedfm.api.predict import export, predict
from fedfm.core import tasks
from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec
from fedfm.errors import InputError, MissingExtra
from fedfm.models.families import unwrap
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.models.text_metrics import Answer
from fedfm.tasks import _languages, _sequence_answers, _sequence_rows
from small import jsonl

TASK = "sequence_to_sequence"
LANGUAGES = {"source_language": "en_XX", "target_language": "ro_RO"}
KEYS = {"mbart": LANGUAGES, "mbart50": LANGUAGES, "whisper_of_languages": {"source_language": "german"}}
INPUTS = ("input_ids", "attention_mask", "input_features")


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """A folder with rows, recordings and, once asked for by ``model_of``, models."""
    folder = tmp_path_factory.mktemp("sequences")
    jsonl(folder / "texts.jsonl", tiny.texts())
    jsonl(folder / "spoken.jsonl", tiny.recordings(folder, 8))
    return folder


@pytest.fixture
def model_of(place):
    """A function: the tiny model of this name, and the table of rows that it reads."""

    def get(name, adaptation=None, **keys):
        if not (folder := place / name).exists():
            tiny.SAVE[name](folder)
        table = load(place / ("spoken.jsonl" if name.startswith("whisper") else "texts.jsonl"))
        spec = ModelSpec(
            str(folder),
            adaptation=adaptation or AdaptationSpec("full"),
            **{"max_length": 16, **KEYS.get(name, {}), **keys},
        )
        return load_model(spec, classes=(), kind=table.kind, task=TASK, seed=1), table

    return get


def load(path, **keys):
    return load_table(DataSpec(path=str(path), **keys), seed=0, task=TASK)


def labels_of(batch):
    return batch["targets"][:, : int((batch["targets"] != -100).sum(1).max())]


# --- loss -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny.SAVE)
def test_loss_is_that_of_transformers(model_of, name):
    """The same batch with ``labels``: the model shifts them itself."""
    model, table = model_of(name)
    batch = model.prepare(table, range(8)).batch(range(8))
    with torch.no_grad():
        theirs = model.module(**{k: v for k, v in batch.items() if k in INPUTS}, labels=labels_of(batch)).loss
        torch.testing.assert_close(model.loss(batch), theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_a_local_pass_is_that_of_seq2seq_trainer(model_of, name, tmp_path):
    """SGD on the same rows in the same order, without dropout: the losses agree to 1e-5."""
    from torch.utils.data import SequentialSampler
    from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

    model, table = model_of(name)
    prepared = model.prepare(table, range(8))
    start = {key: tensor.clone() for key, tensor in model.module.state_dict().items()}
    optimiser = torch.optim.SGD([p for p in model.module.parameters() if p.requires_grad], lr=0.02)
    ours = []
    for at in range(0, 8, 2):
        optimiser.zero_grad()
        loss = model.loss(prepared.batch(range(at, at + 2)))
        loss.backward()
        optimiser.step()
        ours.append(loss.item())
    model.module.load_state_dict(start)

    class InOrder(Seq2SeqTrainer):
        def _get_train_sampler(self, *args):
            return SequentialSampler(self.train_dataset)

    examples = []
    for i in range(8):
        row = prepared.batch([i])
        inputs = {k: v[0] if k == "input_features" else v[0].tolist() for k, v in row.items() if k in INPUTS}
        examples.append(inputs | {"labels": labels_of(row)[0].tolist()})

    def collate(rows):  # recordings have one length
        if name == "t5":
            return DataCollatorForSeq2Seq(model.tools.tokenizer, model.module)(rows)
        labels = torch.nn.utils.rnn.pad_sequence([torch.tensor(r["labels"]) for r in rows], True, -100)
        return {"input_features": torch.stack([r["input_features"] for r in rows]), "labels": labels}

    arguments = Seq2SeqTrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, num_train_epochs=1, learning_rate=0.02, optim="sgd",
        lr_scheduler_type="constant", max_grad_norm=0.0, logging_steps=1, report_to=[], use_cpu=True,
        save_strategy="no", remove_unused_columns=False, disable_tqdm=True,
    )  # fmt: skip
    for module in model.module.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for key in ("dropout", "attention_dropout", "activation_dropout"):
            if isinstance(getattr(module, key, None), float):
                setattr(module, key, 0.0)
    losses = []

    class Record(InOrder):
        def training_step(self, *args, **settings):
            losses.append(float(super().training_step(*args, **settings)))
            return torch.tensor(losses[-1])

    Record(model.module, arguments, data_collator=collate, train_dataset=examples).train()
    assert ours == pytest.approx(losses, rel=1e-5, abs=1e-5)


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny.SAVE)
def test_answers_are_the_likeliest_tokens_after_the_start_of_training(model_of, name):
    """Token by token by hand, from what the decoder reads in training before an output's first word."""
    model, table = model_of(name, answer_tokens=6)
    rows = model.prepare(table, range(4))
    said = _sequence_answers.answers(model, rows)
    assert said == [_sequence_answers.answers(model, rows.take([i]))[0] for i in range(4)]  # in a batch and alone
    tokenizer, ends = model.tools.tokenizer, _languages.ends(model)
    first = {"mbart50": 2, "whisper_of_languages": len(getattr(tokenizer, "prefix_tokens", ()))}.get(name, 1)
    begin = _sequence_rows.shift(model.module, _sequence_rows.outputs(["red"], model.tools).to_padded(0))[0, :first]
    room = len(begin) + 6 if name == "whisper_of_languages" else 7  # a Whisper's first tokens do not count
    end = unwrap(model.module).generation_config.forced_eos_token_id
    for i, answer in enumerate(said):
        inputs = {k: v for k, v in rows.batch([i]).items() if k in INPUTS}
        ids = begin.tolist()
        while len(ids) < room and not (len(ids) > len(begin) and ids[-1] in ends):
            with torch.no_grad():
                found = model.module(**inputs, decoder_input_ids=torch.tensor([ids])).logits[0, -1]
            ids.append(int(found.argmax()) if end is None or len(ids) < room - 1 else end)
        assert answer.text == tokenizer.decode(ids, skip_special_tokens=True)
        assert answer.cut == (ids[-1] not in ends or (end is not None and len(ids) == room))


def test_a_text_has_room_for_its_end(model_of, tmp_path):
    model, table = model_of("t5", max_length=3)
    rows = model.prepare(table, range(4))
    assert all(row[row != -100][-1] == 2 for row in rows.tensors["targets"])
    assert rows.tensors["targets"].shape[1] <= 3
    notices = model.task.forewarnings({"training": table}, model.tools)
    assert any("inputs of 21 of 32 training rows have more than 3 tokens" in line for line in notices)
    assert not any("outputs" in line for line in notices)
    long = jsonl(tmp_path / "long.jsonl", [{"instruction": "say red", "output": "red red red"}])
    found = model.task.forewarnings({"test": load(long)}, model.tools)
    assert any("outputs of 1 of 1 test rows have more than 3 tokens" in line for line in found)


def test_a_tokenizer_without_an_end_gets_one(place):
    folder = place / "endless"
    tiny.save_t5(folder, ends=False)
    table = load(place / "texts.jsonl")
    spec = ModelSpec(str(folder), max_length=3, adaptation=AdaptationSpec("full"))
    model = load_model(spec, classes=(), kind=table.kind, task=TASK)
    assert any("does not write its end token </s>" in line for line in model.notices)
    targets = model.prepare(table, range(4)).tensors["targets"]
    assert all(row[row != -100][-1] == 2 for row in targets)
    assert targets.shape[1] == 3


# --- scores -----------------------------------------------------------------------------------------------------------

SAID = st.lists(st.sampled_from(["red", "fish", "blue", "big"]), max_size=5).map(" ".join)
RIGHT = st.lists(st.sampled_from(["red", "fish", "blue", "big"]), min_size=1, max_size=5).map(" ".join)


def edits(a, b):
    """The smallest number of insertions, deletions and substitutions of words (Wagner and Fischer 1974)."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(SAID, RIGHT, st.integers(0, 3)), min_size=1, max_size=12))
def test_scores_over_clients_are_those_of_the_libraries_on_all_rows(rows):
    import jiwer
    from rouge_score.rouge_scorer import RougeScorer

    task = tasks.find(TASK)
    tokens = {"tokens": 1, "right_tokens": 1, "loss_of_tokens": 0.5}

    def sums(some):
        said = [Answer((), text, False) for text, _, _ in some]
        return {"n": len(some), **tokens, **_sequence_answers.compare(said, [right for _, right, _ in some])}

    found = task.join_scores([sums(part) for c in range(4) if (part := [row for row in rows if row[2] == c])])
    said, right = [row[0] for row in rows], [row[1] for row in rows]
    assert found["wer"] == pytest.approx(jiwer.wer(right, said))
    errors = sum(edits(a.split(), b.split()) for a, b in zip(said, right, strict=True))
    assert found["wer"] == pytest.approx(errors / sum(len(b.split()) for b in right))
    scorer = RougeScorer(["rouge1"])
    rouge = [scorer.score(b, a)["rouge1"].fmeasure for a, b in zip(said, right, strict=True)]
    assert found["rouge_1"] == pytest.approx(sum(rouge) / len(rouge))
    assert found["accuracy"] == pytest.approx(sum(a == b for a, b in zip(said, right, strict=True)) / len(rows))


def test_words_of_other_scripts_count():
    """rouge-score reads the letters a to z alone, so that it would be 0 here."""
    found = _sequence_answers.compare([Answer((), "красная  рыба\n", False)], ["красная рыба"])
    assert (found["rouge_of_answers"], found["word_errors"], found["reference_words"]) == (1.0, 0, 2)


def test_without_answers_there_is_no_library_and_no_score_of_answers(model_of, monkeypatch):
    monkeypatch.setitem(sys.modules, "jiwer", None)
    with pytest.raises(MissingExtra, match=r"fedfm\[seq2seq\]"):
        model_of("t5")
    model, table = model_of("t5", answer_tokens=0)
    found = model.evaluate(model.prepare(table, range(4)))
    assert found["loss"] is not None
    assert all(found[key] is None for key in ("accuracy", "rouge_1", "wer", "answers_cut"))


# --- what is refused --------------------------------------------------------------------------------------------------

GOOD = {"instruction": "say red", "output": "red"}
WRONG = {
    "an empty output": ([GOOD, {"instruction": "say red", "output": " "}], 'line 2: column "output" is empty'),
    "no output": ([GOOD, {"instruction": "say red"}], 'line 2: column "output" is empty'),
    "a number": ([GOOD, {"instruction": 3, "output": "red"}], 'line 2: column "instruction" holds int 3'),
    "messages": ([{"instruction": [{"role": "user", "content": "a"}], "output": "b"}], "line 1: .* a text is expected"),
    "no column": ([{"question": "say red", "output": "red"}], 'no column "instruction" .*nor "audio" .*"question"'),
    "a near column": ([{"audio_": "a.wav", "output": "red"}], r"did you mean .audio_.\?.; one of these two keys"),
    "two inputs": ([GOOD | {"audio": "a.wav"}], "a row has one input"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_rows_are_refused_with_their_place(what, tmp_path):
    rows, words = WRONG[what]
    with pytest.raises(InputError, match=words) as refusal:
        load(jsonl(tmp_path / "rows.jsonl", rows))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "keys", "words"),
    [
        ("mbart50", {"source_language": None}, r"model\.source_language: .* name both by their codes"),
        ("mbart50", {"target_language": None}, r"model\.target_language: .* name both by their codes"),
        ("mbart50", {"target_language": "ro_RX"}, r'model\.target_language = "ro_RX": .*\(did you mean "ro_RO"'),
        ("mbart", {"source_language": "english"}, r'model\.source_language = "english": .* has no such code'),
        ("t5", {"source_language": "en_XX"}, r"model\.source_language: .* has no codes of languages"),
        ("whisper", {"target_language": "en"}, r"model\.target_language: this Whisper knows one language"),
        ("whisper_of_languages", {"source_language": None}, r"model\.source_language: this Whisper knows several"),
        ("whisper_of_languages", {"source_language": "germn"}, r'"germn": no language .*german'),
        ("whisper_of_languages", {"target_language": "french"}, "translates to English alone"),
        ("bart", {"answer_tokens": 40}, "has 40 positions; expected at most 39"),
    ],
)
def test_keys_that_do_not_fit_the_model_are_refused(model_of, name, keys, words):
    with pytest.raises(InputError, match=words):
        model_of(name, **keys)


def test_other_models_are_refused(place, tmp_path):
    import tiny_text

    table = load(place / "texts.jsonl")
    for save, words in ((tiny_text.save_llama, 'model.task = "instruction"'), (tiny_text.save_bert, "encoder-decoder")):
        folder = save(tmp_path / save.__name__)
        with pytest.raises(InputError, match=words):
            load_model(ModelSpec(str(folder)), classes=(), kind=table.kind, task=TASK)


def test_texts_and_recordings_need_their_models(model_of):
    model, table = model_of("whisper")
    other, texts = model_of("t5")
    with pytest.raises(InputError, match=r"holds texts, and the model of model\.name reads recordings"):
        model.prepare(texts, [0])
    with pytest.raises(InputError, match=r"holds recordings, and the model of model\.name reads texts"):
        other.prepare(table, [0])


def tables(place, name="t5", data="texts.jsonl", **changed):
    """An experiment; a key such as ``method__rounds`` changes one value."""
    made = {
        "data": {"path": str(place / data), "partition": {"name": "iid", "clients": 2}},
        "model": {"name": str(place / name), "task": TASK, "max_length": 12, "adaptation": {"name": "lora", "rank": 2}},
        "method": {"name": "fedavg", "rounds": 1, "local": {"name": "sgd", "learning_rate": 0.05, "batch_size": 8}},
        "run": {"seed": 1, "workers": 1},
    }
    for key, value in changed.items():
        table, _, inner = key.partition("__")
        made[table] = {**made.get(table, {}), inner: value} if inner else value
    return made


@pytest.mark.parametrize("method", ["fedpft", "fedncm", "ccvr", "fedkt", "kd"])
def test_methods_of_one_class_a_row_are_refused(place, model_of, method, tmp_path):
    model_of("t5")
    made = tables(place, method={"name": method})
    with pytest.raises(InputError, match=r"\"head\"|no single class") as refusal:
        run(made, tmp_path / "run")
    assert "\n" not in str(refusal.value)
    del made["model"]["adaptation"]
    with pytest.raises(InputError):
        run(made, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_there_is_no_new_head_to_train_alone(place, model_of, tmp_path):
    model_of("t5")
    with pytest.raises(InputError, match="head"):
        run(tables(place, model__adaptation={"name": "head"}), tmp_path / "run")


def test_partitions_by_class_are_refused(place, model_of, tmp_path):
    model_of("t5")
    with pytest.raises(InputError, match=r'"dirichlet" needs labels'):
        run(tables(place, data__partition={"name": "dirichlet", "alpha": 0.5, "clients": 2}), tmp_path / "run")


# --- runs and exports -------------------------------------------------------------------------------------------------


@pytest.mark.sample("secagg")
@pytest.mark.parametrize(
    "changed",
    [
        {
            "privacy": {
                "mechanism": "dp_sgd",
                "unit": "record",
                "noise_multiplier": 1.0,
                "delta": 1e-3,
                "clip_norm": 1.0,
            }
        },
        {"privacy": {"aggregator": "secagg"}, "data__partition": {"name": "iid", "clients": 3}},
        {"attack": {"name": "label_shuffle", "fraction": 0.5}, "method__name": "fedbip"},
    ],
    ids=["dp_sgd", "secagg", "label_shuffle"],
)
def test_runs_under_protection_and_attack(place, model_of, changed, tmp_path):
    model_of("t5")
    result = run(tables(place, **changed), tmp_path / "run")
    assert result["rounds"] == 1
    assert result["loss"] is not None


@pytest.mark.proof
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT on transformers 5
def test_exports_give_the_run_s_answers(place, model_of, tmp_path):
    from peft import AutoPeftModelForSeq2SeqLM
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    model_of("mbart50")
    made = tables(place, "mbart50", model__adaptation={"name": "lora", "rank": 4}, model__source_language="en_XX")
    made["model"] |= {"target_language": "ro_RO", "answer_tokens": 5}
    made["method"] |= {"rounds": 2, "local": {"name": "adamw", "learning_rate": 0.02, "batch_size": 8}}
    run(made, tmp_path / "run")
    asked = jsonl(tmp_path / "asked.jsonl", [{"instruction": row["instruction"]} for row in tiny.texts(6)])
    found = predict(tmp_path / "run", asked)
    for to, auto in (("hf", AutoModelForSeq2SeqLM), ("peft", AutoPeftModelForSeq2SeqLM)):
        folder = tmp_path / to
        export(tmp_path / "run", to, folder)
        card = (folder / "README.md").read_text()
        assert "pipeline_tag: text2text-generation" in card
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert (tokenizer.src_lang, tokenizer.tgt_lang) == ("en_XX", "ro_RO")
        theirs = auto.from_pretrained(folder)
        asked_for = tokenizer([row["instruction"] for row in tiny.texts(6)], padding=True, return_tensors="pt")
        said = theirs.generate(**asked_for)
        assert tokenizer.batch_decode(said, skip_special_tokens=True) == found["answers"]
    about = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert about["task_type"] == "SEQ_2_SEQ_LM"


def test_predictions_are_scored_where_outputs_are_known(place, model_of, tmp_path):
    model_of("t5")
    run(tables(place), tmp_path / "run")
    rows = [{"instruction": "say red", "output": "red"}, {"instruction": "say fish"}]
    found = predict(tmp_path / "run", jsonl(tmp_path / "asked.jsonl", rows))
    assert len(found["answers"]) == 2
    assert found["exact_match"] in (0.0, 1.0)
    assert found["wer"] == pytest.approx(edits(found["answers"][0].split(), ["red"]))
    assert found["loss"] is not None
    bare = predict(tmp_path / "run", jsonl(tmp_path / "bare.jsonl", rows[1:]))
    assert bare["wer"] is bare["loss"] is None


@pytest.mark.parametrize("kind", ["T5", "SwitchTransformers"])
def test_a_decoder_with_more_layers_than_the_encoder_answers(tmp_path, place, kind):
    """transformers' cache has as many places as the encoder has layers; answers without it, one token at a time."""
    import transformers

    tiny.save_t5(tmp_path)
    base = transformers.T5Config.from_pretrained(tmp_path).to_dict()
    shape = {k: base[k] for k in ("vocab_size", "d_model", "d_kv", "d_ff", "num_heads", "pad_token_id", "eos_token_id")}
    if kind != "T5":
        shape |= {"num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    layers = {"num_layers": 1, "num_decoder_layers": 3, "decoder_start_token_id": 1}
    torch.manual_seed(0)
    network = getattr(transformers, f"{kind}ForConditionalGeneration")
    network(getattr(transformers, f"{kind}Config")(**shape, **layers)).eval().save_pretrained(tmp_path)
    table = load(place / "texts.jsonl")
    spec = ModelSpec(str(tmp_path), adaptation=AdaptationSpec("full"), max_length=16)
    model = load_model(spec, classes=(), kind=table.kind, task=TASK, seed=1)
    rows = model.prepare(table, range(3))
    config = _languages.greedy_settings(model, model.task.generation_settings(model))
    for i, answer in enumerate(_sequence_answers.answers(model, rows)):
        inputs = {name: of for name, of in rows.batch([i]).items() if name in INPUTS}
        ids = [1]
        for _ in range(config.max_new_tokens or config.max_length - 1):
            with torch.no_grad():
                ids.append(int(model.module(**inputs, decoder_input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == 2:
                break
        assert len(answer.tokens) > 1
        assert list(answer.tokens) == ids[: len(answer.tokens)]
