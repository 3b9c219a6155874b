"""The parameters that weight decay skips, against transformers' own Trainer."""

import pytest
import torch
from torch import nn

from fedfm.models.decay import no_weight_decay
from fedfm.training.scheduler import train_client

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


def families():
    yield transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=9, **SIZES))
    yield transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=9, num_key_value_heads=2, **SIZES))
    yield transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=2))
    yield transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    )
    yield transformers.ResNetForImageClassification(
        transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1])
    )
    yield nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.BatchNorm1d(2), nn.RMSNorm(2))


@pytest.mark.parametrize("module", list(families()), ids=lambda module: type(module).__name__)
def test_weight_decay_skips_the_parameters_that_the_trainer_skips(module):
    trainer = transformers.Trainer.__new__(transformers.Trainer)  # the method reads the module alone
    decayed = set(trainer.get_decay_parameter_names(module))
    names = {name for name, _ in module.named_parameters()}
    assert no_weight_decay(module) == names - decayed
    assert {name for name, _ in module.named_parameters() if name.endswith("bias")} <= no_weight_decay(module)


@pytest.mark.parametrize(("decay_of", "spares"), [("weights", True), ("all", False)])
def test_the_loop_spares_what_the_model_names(decay_of, spares):
    from fedfm.core.client import Client, ClientData
    from fedfm.core.rows import Rows
    from fedfm.models.wrap import wrap
    from fedfm.training import AdamW, loop
    from fedfm.training.local_job import Job

    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    model = wrap(net, lambda m, b: (m(b["features"]) * 0).sum())  # without a gradient decay alone moves weights
    rows = Rows({"features": torch.ones(4, 3)}, labels=torch.zeros(4, dtype=torch.int64))
    client = Client("a", ClientData(lambda: rows, Rows, Rows), model, {}, 0, trainer=train_client)
    w = model.params()
    (got,) = loop.train([Job(client, w, AdamW(learning_rate=0.1, weight_decay=1.0, batch_size=4, decay_of=decay_of))])
    for name in w:
        factor = 1.0 if spares and name in no_weight_decay(net) else 0.9
        torch.testing.assert_close(got[name], w[name] * factor)
