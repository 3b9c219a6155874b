"""model.compile: the blocks are compiled, results are within rounding, and a missing compiler is said."""

import dataclasses

import pytest
import torch
from tiny_models import load, sentences

from fedfm.config.experiment import Experiment
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.models import compiled
from fedfm.models.adapters import lora

TABLES = {
    "data": {"name": "digits"},
    "model": {"name": "nano-vit"},
    "method": {"name": "fedavg"},
}


@pytest.fixture(autouse=True)
def afresh():
    compiled._missing.cache_clear()
    yield
    torch._dynamo.reset()
    compiled._missing.cache_clear()


@pytest.mark.proof
def test_compiled_blocks_compute_within_rounding(folder):
    """Gradients, outputs, and outputs with a shift of the weights, which is a hook inside of a compiled block. One of
    the blocks, since each takes seconds.
    """
    model, plain = (load(folder("gpt2"), sentences(), "lora") for _ in range(2))
    one = dataclasses.replace(model.parts, blocks=model.parts.blocks[-1:])
    if reason := compiled.compile_blocks(one, "default", torch.device("cpu")):
        pytest.skip(reason)
    w = plain.params()
    w = w + 0.1 * Params({n: torch.ones_like(t) for n, t in w.items()})
    batch = plain.prepare(sentences(), [0]).batch([0])
    draw = torch.Generator().manual_seed(0)

    def factor(*shape):
        return torch.randn(*shape, generator=draw)

    shift = {p: (factor(w[b].shape[0], 1), factor(1, w[a].shape[1])) for p, (a, b) in lora.pairs(w).items()}
    found = []
    for m in (model, plain):
        m.load(w)
        m.loss(batch).backward()
        with m.evaluating():
            as_it_is = m.logits(batch)
            with lora.shift_weights(m, shift):
                shifted = m.logits(batch)
            found.append([as_it_is, shifted, m.logits(batch), *(p.grad for p in m.live().values())])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    for mine, exact in zip(*found, strict=True):
        torch.testing.assert_close(mine, exact, atol=1e-5, rtol=1e-4)
    assert (found[1][0] - found[1][1]).norm() > 0.01


def test_without_a_compiler_the_model_runs_and_says_so(folder, monkeypatch):
    def none(*_, **__):
        raise RuntimeError("no C++ compiler was found\nlong story")

    monkeypatch.setattr(torch, "compile", none)
    model = load(folder("gpt2"), sentences(), "lora", compile="default")
    why = "there is no compiler for cpu here (no C++ compiler was found); the model runs as it is"
    assert model.notices == (f'model.compile = "default": {why}',)
    plain = load(folder("gpt2"), sentences(), "lora")
    rows = model.prepare(sentences(), range(4))
    assert model.predict(rows).equal(plain.predict(rows))


def test_true_is_the_default_mode_and_false_none():
    for given, kept in ((True, "default"), (False, None), ("max-autotune", "max-autotune")):
        found = Experiment.from_dict(TABLES | {"model": {"name": "nano-vit", "compile": given}})
        assert found.model.compile == kept
        assert Experiment.from_dict(found.to_dict()).model.compile == kept
    with pytest.raises(InputError, match=r'model.compile = "fast": expected "default"'):
        Experiment.from_dict(TABLES | {"model": {"name": "nano-vit", "compile": "fast"}})


def test_incompatible_settings_are_refused(folder):
    with pytest.raises(InputError, match=r'run.kernels = "fast": packed clients skip the blocks'):
        Experiment.from_dict(TABLES | {"model": {"name": "nano-vit", "compile": True}, "run": {"kernels": "fast"}})
    with pytest.raises(InputError, match=r"drop this key or model\.gradient_checkpointing"):
        load(folder("gpt2"), sentences(), "lora", compile="default", gradient_checkpointing=True)
