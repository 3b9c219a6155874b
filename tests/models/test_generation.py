"""What a model's settings of generation ask for, and greedy answers leave out, is said."""

import numpy as np
import pytest
from tiny_models import load

from fedfm.data.table import Table
from fedfm.models.language.generation import left_out
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
