"""Models with a recurrent state: answers in a batch, and weights that the models rescale themselves."""

import numpy as np
import pytest
import torch
import transformers
from test_later_words import _SMALL, ONE_WAY, saved
from tiny_models import load

from fedfm.core.rows import Rows
from fedfm.core.tokens import Tokens
from fedfm.data.table import Table
from fedfm.models.export import export
from fedfm.models.influence import reads_padding
from fedfm.models.spec import AdaptationSpec
from fedfm.models.text_metrics import answers

_RWKV = {**_SMALL, "hidden_size": 16, "num_hidden_layers": 3, "context_length": 32, "rescale_every": 1}
ASKED = [("the", ""), ("dog", ""), ("the quick brown fox jumps", ""), ("seven small", ""), ("over a lazy dog", "")]
TABLE = Table("instruction", ASKED, None, (), np.full(len(ASKED), "train"), source="a.jsonl")
ALL_LINEAR = AdaptationSpec("lora", rank=2, targets=("all-linear",))


@pytest.fixture(scope="module")
def rwkv(tmp_path_factory):
    folder = saved(tmp_path_factory.mktemp("rwkv"), "RwkvConfig", _RWKV, "CausalLM")
    with torch.no_grad():  # its first weights give all texts the same outputs
        module, draws = transformers.AutoModelForCausalLM.from_pretrained(folder), torch.Generator().manual_seed(4)
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=draws) * 0.8)
        module.save_pretrained(folder)
    return folder


def adapted(folder, **settings):
    model = load(folder, TABLE, ALL_LINEAR, template="{instruction} ", answer_tokens=5, **settings)
    w, draws = model.params(), torch.Generator().manual_seed(0)
    model.load(w.replace({name: torch.randn(w[name].shape, generator=draws) * 0.2 for name in w}))
    return model


def test_an_answer_does_not_depend_on_other_prompts_of_the_batch(rwkv):
    model = adapted(rwkv)
    together = answers(model, model.prepare(TABLE, range(len(TABLE))))
    assert together == [answers(model, model.prepare(TABLE, [i]))[0] for i in range(len(TABLE))]
    assert len({answer.text for answer in together}) > 1


@pytest.mark.parametrize(("config", "reads"), [("MixtralConfig", False), ("MambaConfig", False), ("RwkvConfig", True)])
def test_models_that_read_padding_are_recognised(tmp_path, rwkv, config, reads):
    folder = rwkv if config == "RwkvConfig" else saved(tmp_path, config, *ONE_WAY[config])
    model = load(folder, TABLE, "full", template="{instruction} ")
    assert reads_padding(model, torch.arange(5, 12), pad=0) == reads


def test_weights_that_a_model_scales_in_evaluation_are_restored(rwkv, tmp_path):
    model = adapted(rwkv)
    rows = Rows(tokens=Tokens.of([torch.arange(5, 15)]))
    with torch.no_grad():
        mine = model.logits(rows.batch([0]))
        base = transformers.AutoModelForCausalLM.from_pretrained(rwkv).eval()
        export(model, model.params(), "hf", tmp_path / "hf")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()(torch.arange(5, 15)[None])
        torch.testing.assert_close(theirs.logits, mine, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(base(torch.arange(5, 15)[None]).logits, mine, atol=0.1)
