"""In training a foundation model computes as in evaluation, and each word of a text moves its own row."""

import json

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import save_tokenizer

import tiny_seq2seq as tiny
from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec
from fedfm.models import kept_outputs, positions
from fedfm.models.families import unwrap
from fedfm.models.load import load_model
from fedfm.models.quiet import quiet
from fedfm.models.spec import AdaptationSpec, ModelSpec
from small import jsonl

_SEQUENCES = "sequence_to_sequence"
_DROPS = ("dropout", "activation_dropout", "attention_dropout", "encoder_layerdrop", "decoder_layerdrop", "layerdrop")
_MASKS = {"apply_spec_augment": True, "mask_time_prob": 0.5, "mask_time_length": 2, "mask_feature_prob": 0.5}
_ADAPTATIONS = (AdaptationSpec("full"), AdaptationSpec("lora", rank=2))
_SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}


def _drop(folder):
    """The model in the folder with everything that its architecture can drop or mask at random."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | dict.fromkeys(_DROPS, 0.7) | _MASKS))
    return folder


def _opt(folder):
    config = transformers.OPTConfig(**_SIZES, ffn_dim=24, word_embed_proj_dim=16, pad_token_id=0, bos_token_id=4)
    transformers.OPTForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder, "llama")
    return folder


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """By architecture: a folder with its model, and rows."""
    home = tmp_path_factory.mktemp("drops")
    asked = [{"instruction": "the quick fox", "output": word} for word in ("jumps", "sing over", "a lazy dog")]
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        made = {
            "bart": (tiny.save_bart, tiny.texts(6), _SEQUENCES),
            "whisper": (tiny.save_whisper, tiny.recordings(home, 6), _SEQUENCES),
            "opt": (_opt, asked, "instruction"),
        }
        folders = {name: _drop(save(home / name)) for name, (save, _, _) in made.items()}
    files = {name: jsonl(home / f"{name}.jsonl", rows) for name, (_, rows, _) in made.items()}
    specs = {name: DataSpec(path=str(path), test_fraction=0.0) for name, path in files.items()}
    tables = {name: load_table(spec, seed=0, task=made[name][2]) for name, spec in specs.items()}
    return {name: (folders[name], tables[name], made[name][2]) for name in made}


@pytest.mark.parametrize("name", ["bart", "whisper", "opt"])
def test_nothing_is_dropped_or_masked_at_random(places, name):
    folder, table, task = places[name]
    for adaptation in _ADAPTATIONS:
        spec = ModelSpec(str(folder), adaptation=adaptation, max_length=16)
        model = load_model(spec, classes=(), kind=table.kind, task=task)
        batch = model.prepare(table, range(3)).batch(range(3))
        with model.evaluating():
            still = model.loss(batch)
        model.train_mode()
        for seed in range(3):
            torch.manual_seed(seed)
            assert torch.equal(model.loss(batch).detach(), still)
        # The rule, also for architectures that are not here: what decides by its own mode is in evaluation mode.
        whole = [m for m in unwrap(model.module).modules() if isinstance(m, transformers.PreTrainedModel)]
        assert [m.training for m in whole] == [False] * max(len(whole), 1)
        assert not kept_outputs.keepers(model.module)


@pytest.fixture(scope="module", params=[False, True], ids=["padding chosen", "padding stated"])
def unpadded(request, tmp_path_factory):
    """(a LLaMA, whether its configuration states the token that pads); its tokenizer has no padding token."""
    folder = tmp_path_factory.mktemp("llama")
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        ids = {"bos_token_id": 4, "eos_token_id": 3, "pad_token_id": 3 if request.param else None}
        config = transformers.LlamaConfig(**_SIZES, intermediate_size=24, **ids)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
        save_tokenizer(folder, pad=False)
    spec = ModelSpec(str(folder), adaptation=AdaptationSpec("full"), max_length=16)
    return load_model(spec, classes=(), kind="instruction"), folder


@settings(max_examples=15, deadline=None)
@given(rows=st.lists(st.lists(st.integers(3, 12), min_size=2, max_size=7), min_size=1, max_size=4))
def test_each_word_of_a_text_moves_as_in_transformers(unpadded, rows):
    """Also the token that pads: the gradient is the one of a model that transformers loads, padded by its user."""
    model, folder = unpadded
    longest = max(map(len, rows))
    ids = torch.tensor([row + [3] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    theirs(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
    model.train_mode()
    model.module.zero_grad()
    model.loss({"input_ids": ids, "attention_mask": mask}).backward()
    found, wanted = (positions.embedding(m).weight.grad for m in (model.module, theirs))
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-4)
    read = {i for row in rows for i in row[:-1]} - ({3} if theirs.config.pad_token_id == 3 else set())
    assert all(found[i].abs().max() > 0 for i in read)
