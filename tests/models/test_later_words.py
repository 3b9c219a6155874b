"""A model that sees the words that it is to predict is refused before it is trained."""

import contextlib

import pytest
import torch
import transformers
from tiny_models import load, prose, save_tokenizer

from fedfm.errors import InputError
from fedfm.models import first_batch, later_words
from fedfm.models.load import load_model
from fedfm.models.quiet import quiet
from fedfm.models.spec import AdaptationSpec, ModelSpec

_SMALL = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 4, "eos_token_id": 3}
_XLM = {**_SMALL, "emb_dim": 16, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 40, "pad_index": 0}
_LLAMA = {**_SMALL, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
BOTH_WAYS = {
    "XLMConfig": (_XLM, "MaskedLM"),
    "XLNetConfig": ({**_SMALL, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24}, "CausalLM"),
}
ONE_WAY = {
    "XLMConfig": ({**_XLM, "causal": True}, "MaskedLM"),
    "MixtralConfig": ({**_LLAMA, "num_local_experts": 4, "num_key_value_heads": 2}, "CausalLM"),
    "MambaConfig": ({**_SMALL, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}, "CausalLM"),
}

HOLLOW = {name: ONE_WAY[name] for name in ("XLMConfig", "MambaConfig")} | {"LlamaConfig": (_LLAMA, "CausalLM")}
TARGETS = {"XLNetConfig": ("layer_1",), "MambaConfig": ("in_proj",)}


def saved(folder, config, sizes, auto):
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = getattr(transformers, f"AutoModelFor{auto}").from_config(getattr(transformers, config)(**sizes))
        made.save_pretrained(folder)
        save_tokenizer(folder, "llama")
    return folder


def look(path, dtype="float32"):
    model = load(path, prose(), "full", dtype=dtype)
    return first_batch.look(model, model.prepare(prose(), range(4)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", BOTH_WAYS)
def test_a_model_that_attends_in_both_directions_is_refused(tmp_path, config, dtype):
    with pytest.raises(InputError, match="sees the words that it predicts") as error:
        look(saved(tmp_path, config, *BOTH_WAYS[config]), dtype)
    assert ('"causal": true' in str(error.value)) == hasattr(getattr(transformers, config)(), "causal")


@pytest.mark.parametrize(("config", "sees"), [*((c, True) for c in BOTH_WAYS), *((c, False) for c in HOLLOW)])
def test_a_server_without_the_weights_sees_it_too(tmp_path, config, sees):
    folder = saved(tmp_path, config, *(BOTH_WAYS if sees else HOLLOW)[config])
    spec = ModelSpec(str(folder), adaptation=AdaptationSpec("lora", rank=2, targets=TARGETS.get(config)))
    model = load_model(spec, classes=(), kind="passages", hollow=True)
    assert model.hollow
    before = {name: p.clone() for name, p in model.module.named_parameters()}
    with pytest.raises(InputError, match="sees the words that it predicts") if sees else contextlib.nullcontext():
        later_words.refuse_hollow(model)
    assert all(p.equal(before[name]) for name, p in model.module.named_parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", ONE_WAY)
def test_a_causal_model_is_accepted(tmp_path, config, dtype):
    look(saved(tmp_path, config, *ONE_WAY[config]), dtype)
