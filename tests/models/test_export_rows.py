"""An export reads rows and ends answers as the run does: tokenizer, generation settings, and the README's code."""

import re
import shutil

import numpy as np
import pytest
import torch
from test_model_export import expected, trained
from test_preference import table as preferences
from tiny_models import images, load, prose, sentences, vectors

from fedfm.api.model_card import how_to_load
from fedfm.data.feature_scales import scale_features
from fedfm.data.table import Table
from fedfm.models.adapter_files import holding
from fedfm.models.export import export
from fedfm.models.quiet import quiet
from fedfm.models.text_metrics import answers, end_tokens

ASKED = [("fox", "dog"), ("the lazy dog jumps", "a"), ("seven small", "birds sing")]
# Its answers end with a token that is neither the model's nor the tokenizer's end.
TURNS = "{% for m in messages %}<s> {{ m['content'] }} [CLS]{% endfor %}{% if add_generation_prompt %}<s> a {% endif %}"


def code_of(model, to, out):
    return "\n".join(re.findall(r"```python\n(.*?)```", "\n".join(how_to_load(model, to, out)), re.DOTALL))


def run_code(model, to, out):
    names = {}
    with quiet():
        exec(code_of(model, to, out).replace("FOLDER", str(out)), names)
    return names


def with_template(folder, place):
    """A copy of a language model whose chat template ends answers with [CLS]."""
    from transformers import AutoTokenizer

    shutil.copytree(folder, place)
    tokenizer = AutoTokenizer.from_pretrained(place)
    tokenizer.chat_template, tokenizer.cls_token = TURNS, "[CLS]"
    tokenizer.save_pretrained(place)
    return place


def instructions():
    return Table("instruction", ASKED, None, (), np.full(len(ASKED), "train"), source="rows.jsonl")


@pytest.mark.parametrize("to", ["peft", "hf"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])  # gpt2 here has no padding token
def test_an_export_answers_a_batch_as_the_run_does(folder, tmp_path, family, to):
    model = load(with_template(folder(family), tmp_path / "base"), instructions(), "lora", answer_tokens=5)
    w = trained(model)
    export(model, w, to, tmp_path / "out")
    names = run_code(model, to, tmp_path / "out")
    tokenizer, module = names["tokenizer"], names["model"].eval()
    assert set(module.generation_config.eos_token_id) == end_tokens(model, called=True) == {2, 3}
    model.load(w)
    prompts = [[{"role": "user", "content": said}] for said, _ in ASKED]
    batch = tokenizer.apply_chat_template(
        prompts, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )
    batch.pop("token_type_ids", None)
    given = module.generate(**batch)[:, batch["input_ids"].shape[1] :]
    assert given.shape[1] <= 5
    for row, answer in zip(
        given.tolist(), answers(model, model.prepare(instructions(), range(len(ASKED)))), strict=True
    ):
        assert row[: len(answer.tokens)] == list(answer.tokens)
        assert set(row[len(answer.tokens) :]) <= {tokenizer.pad_token_id}  # the answer ends where the run's does


@pytest.mark.parametrize("drawn", [None, True], ids=["nothing stated", "drawn by its makers"])
def test_a_pipeline_answers_as_the_run_does_unless_the_makers_state_otherwise(folder, tmp_path, drawn):
    """transformers' own pipeline of texts draws them if the file says nothing."""
    from transformers import pipeline

    model = load(with_template(folder("llama"), tmp_path / "base"), instructions(), "lora", answer_tokens=5)
    model.module.generation_config.do_sample = drawn
    w = trained(model)
    export(model, w, "hf", tmp_path / "out")
    say = pipeline("text-generation", str(tmp_path / "out"))
    assert say.model.generation_config.do_sample is bool(drawn)
    assert say.model.generation_config.num_beams == 1
    if drawn:
        return
    model.load(w)
    prompts = [[{"role": "user", "content": said}] for said, _ in ASKED]
    given = [found[0]["generated_text"][-1]["content"] for found in say(prompts)]
    assert [text.split() for text in given] == [
        answer.text.split() for answer in answers(model, model.prepare(instructions(), range(len(ASKED))))
    ]


def test_the_base_keeps_its_own_generation_settings(folder, tmp_path):
    model = load(with_template(folder("llama"), tmp_path / "base"), instructions(), "lora")
    own = (tmp_path / "base/generation_config.json").read_bytes()
    export(model, model.params(), "peft", tmp_path / "out")
    assert (tmp_path / "base/generation_config.json").read_bytes() == own


@pytest.mark.parametrize(
    ("family", "rows", "side"),
    [
        ("llama", instructions(), "left"),
        ("llama", preferences(), "left"),
        ("llama", prose(), "right"),  # the tokenizer's own
        ("llama", sentences(), "right"),
        ("bert", sentences(), "right"),
    ],
)
def test_an_exports_tokenizer_pads_on_the_runs_side(folder, tmp_path, family, rows, side):
    from transformers import AutoTokenizer

    model = load(folder(family), rows, "lora")
    export(model, model.params(), "hf", tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").padding_side == side


@pytest.mark.parametrize("scale", ["none", "row", "unit"])
def test_the_code_of_a_head_scales_vectors_as_the_run_does(tmp_path, scale):
    rows = vectors()
    rows.inputs[0] = 2.0  # a constant vector, which has no deviation
    rows.inputs[1] = 0.0
    model = load("features", rows)
    w = trained(model)
    export(model, w, "torch", tmp_path / "out", scale=scale)
    found = run_code(model, "torch", tmp_path / "out")["logits"](torch.from_numpy(rows.inputs))
    scaled = scale_features(rows, scale)
    assert torch.allclose(found, expected(model, w, model.prepare(scaled, range(5))), atol=1e-6)


@pytest.mark.parametrize(("family", "to", "keys"), [("vit", "peft", {}), ("clip", "hf", {"task": "zero_shot"})])
def test_the_code_reads_pictures_without_torchvision(folder, tmp_path, family, to, keys):
    model = load(folder(family), images(), "lora", **keys)
    export(model, model.params(), to, tmp_path)
    (call,) = re.findall(r"AutoImageProcessor.from_pretrained.*", code_of(model, to, tmp_path))
    assert call == 'AutoImageProcessor.from_pretrained("FOLDER", backend="pil")'


@pytest.mark.parametrize(("family", "rows"), [("llama", prose()), ("bert", sentences())])
def test_an_export_has_the_change_that_a_run_in_16_bits_learned(folder, tmp_path, family, rows):
    from peft.tuners.lora import LoraLayer
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    model = load(folder(family), rows, "lora", dtype="bfloat16")
    w = type(model.params())({n: 0.02 * t for n, t in trained(model).items()})  # as small as after few steps
    with holding(model, w):
        export(model, w, "hf", tmp_path / "out")
        changes = {
            name.removeprefix("base_model.model."): (m.get_delta_weight("default"), m.base_layer.weight.float())
            for name, m in model.module.named_modules()
            if isinstance(m, LoraLayer)
        }
    auto = AutoModelForSequenceClassification if model.classes else AutoModelForCausalLM
    whole = auto.from_pretrained(tmp_path / "out")
    assert changes
    for name, (change, before) in changes.items():
        found = whole.get_submodule(name).weight - before
        assert (found - change).norm() < 0.01 * change.norm()
    text = " ".join(how_to_load(model, "hf", tmp_path / "out"))
    assert "are float32: rounded to bfloat16, they would lose" in text
