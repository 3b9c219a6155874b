"""What a model's settings of generation ask for, and greedy answers leave out, is said."""

import json
import shutil

import numpy as np
import pytest
from tiny_models import load

from fedfm.data.table import Table
from fedfm.models.language.generation import left_out, settings_in_force
from fedfm.models.text_metrics import answers

TABLE = Table("instruction", [("the fox", "jumps")] * 3, None, (), np.full(3, "train"), source="a.jsonl")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, None),
        ({"repetition_penalty": 1.5}, None),
        ({"do_sample": True, "temperature": 0.1}, "do_sample = true, which"),
        ({"num_beams": 4}, "num_beams = 4, which"),
        ({"do_sample": True, "num_beams": 2}, "do_sample = true and num_beams = 2, which"),
        ({"stop_strings": ["fox"]}, "stop_strings = ['fox'], which"),
        ({"max_time": 1e-9}, "max_time = 1e-09, which"),
        (
            {"prompt_lookup_num_tokens": 3, "token_healing": True},
            "prompt_lookup_num_tokens = 3 and token_healing = true",
        ),
        ({"return_dict_in_generate": True, "is_assistant": True}, None),
    ],
)
def test_drawn_answers_and_beams_are_left_out_with_a_word(folder, settings, said):
    model = load(folder("llama"), TABLE, "lora", template="alpaca", answer_tokens=6)
    greedy = answers(model, model.prepare(TABLE, range(3)))
    for key, value in settings.items():
        setattr(model.module.generation_config, key, value)
    assert (said or "") in left_out(model)
    assert bool(left_out(model)) == (said is not None)
    if said:
        assert answers(model, model.prepare(TABLE, range(3))) == greedy


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, ""),
        ({"temperature": 0.1, "max_length": 3, "repetition_penalty": 1.0, "forced_eos_token_id": None}, ""),
        (
            {"repetition_penalty": 1.5, "suppress_tokens": list(range(40))},
            "repetition_penalty = 1.5, suppress_tokens = ",
        ),
        ({"forced_bos_token_id": 1}, "forced_bos_token_id = 1"),
    ],
)
def test_settings_that_answers_follow_are_reported(folder, settings, said):
    model = load(folder("llama"), TABLE, "lora", template="alpaca", answer_tokens=6)
    for key, value in settings.items():
        setattr(model.module.generation_config, key, value)
    assert said in settings_in_force(model)
    assert bool(settings_in_force(model)) == bool(said)


@pytest.mark.parametrize(
    "settings", [{"encoder_repetition_penalty": 4.0}, {"min_length": 6}, {"forced_bos_token_id": 9}]
)
def test_answers_are_the_same_alone_whatever_reads_padding(folder, settings):
    rows = [("the", ""), ("the quick brown fox jumps", ""), ("a dog", "")]
    table = Table("instruction", rows, None, (), np.full(3, "train"), source="a.jsonl")
    model = load(folder("llama"), table, "lora", template="{instruction}", answer_tokens=6)
    for key, value in settings.items():
        setattr(model.module.generation_config, key, value)
    alone = [answers(model, model.prepare(table, [i]))[0] for i in range(3)]
    assert answers(model, model.prepare(table, range(3))) == alone


def test_a_model_that_gives_the_choices_of_its_router_answers_prompts_of_several_lengths(folder, tmp_path):
    from transformers import MixtralConfig, MixtralForCausalLM

    path, like = (
        shutil.copytree(folder("llama"), tmp_path / "m"),
        json.loads((folder("llama") / "config.json").read_text()),
    )
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "num_local_experts": 4, "vocab_size": like["vocab_size"]}
    MixtralForCausalLM(MixtralConfig(**sizes, output_router_logits=True)).save_pretrained(path)
    table = Table("instruction", [("the fox", "a"), ("fox the fox jumps", "a")], None, (), np.full(2, "train"))
    model = load(path, table, "lora", template="alpaca", answer_tokens=3)
    assert len(answers(model, model.prepare(table, range(2)))) == 2
    assert "the loss that balances its experts is not trained" in "\n".join(model.notices)
