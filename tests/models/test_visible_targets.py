"""A user's language model that sees the words which it predicts is refused, or said to, before the first round."""

import pytest
import torch
import transformers as t
from torch import nn
from torch.nn.functional import cross_entropy

from fedfm.data.spec import DataSpec
from fedfm.errors import InputError
from fedfm.models.user.user_inputs import read_inputs
from fedfm.runtime.user_population import of_inputs

V, MASK = 40, 39
TEXTS = [torch.randint(5, 35, (9,), generator=torch.Generator().manual_seed(i)) for i in range(8)]
_BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
_XLNET = {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16}
_GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16, "bos_token_id": 1, "eos_token_id": 2}


def notices(module, rows, **more):
    user_inputs = read_inputs({"model": module, "clients": {"a": rows[:4], "b": rows[4:]}, **more})
    return [text for text in of_inputs(user_inputs, DataSpec(), 0).model.notices if "sees the words" in text]


def whole(prompt=0):
    """Rows of which all words but those of a prompt are targets, at their own places."""
    ignored = torch.full((prompt,), -100)
    return [{"input_ids": x, "labels": torch.cat([ignored, x[prompt:]])} for x in TEXTS]


def masked():
    rows = [{"input_ids": x.clone(), "labels": torch.full_like(x, -100)} for x in TEXTS]
    for row, x in zip(rows, TEXTS, strict=True):
        row["labels"][2:7] = x[2:7]
        row["input_ids"][3:7] = MASK  # of the chosen words one stays as it is
    return rows


@pytest.mark.parametrize("prompt", [0, 3])
def test_a_model_of_transformers_that_attends_in_both_directions_is_refused(prompt):
    both = (
        t.XLNetLMHeadModel(t.XLNetConfig(vocab_size=V, **_XLNET)),
        t.BertLMHeadModel(t.BertConfig(vocab_size=V, **_BERT)),
    )
    for module in both:
        with pytest.raises(InputError, match="sees the words that it predicts"):
            notices(module, whole(prompt))


def test_causal_masked_and_paired_models_are_accepted():
    causal = t.BertLMHeadModel(t.BertConfig(vocab_size=V, **_BERT, is_decoder=True))
    for module in (causal, t.GPT2LMHeadModel(t.GPT2Config(vocab_size=V, **_GPT2))):
        assert not notices(module, whole())
        assert not notices(module, whole(prompt=3))
    renamed = [{"input_ids": row["input_ids"], "label": row["labels"]} for row in whole()]

    def objective(module, batch):
        return module(input_ids=batch["input_ids"], labels=batch["label"]).loss

    assert not notices(causal, renamed, objective=objective)
    assert not notices(t.BertForMaskedLM(t.BertConfig(vocab_size=V, **_BERT)), masked())
    pair = t.T5Config(vocab_size=V, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    assert not notices(t.T5ForConditionalGeneration(pair), whole())


class Words(nn.Module):
    """Logits of words by a recurrent network, which may read a text from both ends."""

    def __init__(self, both):
        super().__init__()
        self.embed, self.head = nn.Embedding(V, 8), nn.Linear(16 if both else 8, V)
        self.read = nn.GRU(8, 8, batch_first=True, bidirectional=both)

    def forward(self, x):
        return self.head(self.read(self.embed(x))[0])


@pytest.mark.parametrize("both", [True, False])
def test_a_users_module_that_sees_its_targets_is_reported(both):
    torch.manual_seed(0)  # with some weights the words that follow change too little to be noticed
    rows = [(x[:-1], x[1:]) for x in TEXTS]
    found = notices(Words(both), rows, loss=lambda out, y: cross_entropy(out.flatten(0, 1), y.flatten()))
    assert len(found) == both
