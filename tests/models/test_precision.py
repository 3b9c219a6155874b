"""Half precision: what is trained is float32, and trains as it does in float32."""

import numpy as np
import pytest
import torch
from tiny_models import load, table_for

import fedfm
from fedfm.core.client import Client, ClientData
from fedfm.core.rows import Rows
from fedfm.errors import InputError
from fedfm.training import SGD, AdamW
from fedfm.training.local_job import Job
from fedfm.training.scheduler import train, train_client

FAMILIES = ("vit", "resnet", "swin", "convnext", "bert", "roberta", "distilbert", "gpt2", "llama")
ADAPTATIONS = ("lora", "top_layers", "full", "head")


def trained(path, family, adaptation, dtype, local):
    table = table_for(family, 12)
    model = load(path, table, adaptation, dtype=dtype)
    rows = model.encode(model.prepare(table, range(12)))
    client = Client("a", ClientData(lambda: rows, Rows, Rows), model, {}, 5, trainer=train_client)
    start = model.params()
    return start, train(Job(client, start, local)), client.metrics["loss"]


@pytest.mark.sample("vit-lora", "convnext-head", "llama-lora")
@pytest.mark.each_value
@pytest.mark.parametrize("adaptation", ADAPTATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_trains_as_float32_does(folder, family, adaptation):
    local = SGD(learning_rate=0.05, epochs=2, batch_size=4)
    start, half, loss = trained(folder(family), family, adaptation, "bfloat16", local)
    same, single, exact = trained(folder(family), family, adaptation, "float32", local)
    assert {t.dtype for t in half.values()} == {torch.float32}
    assert loss == pytest.approx(exact, abs=0.08)
    if family != "resnet":  # its batch norm divides by deviations near zero: directions differ with the rounding
        moved = (half - start).norm(), (single - same).norm()
        assert moved[0] == pytest.approx(moved[1], rel=0.3)


def test_small_steps_are_not_lost(folder):
    """A step of 1e-4 is below half a unit in the last place of a bfloat16 weight of 0.5 or more."""
    local = AdamW(learning_rate=1e-4, epochs=40, batch_size=12)
    start, half, _ = trained(folder("vit"), "vit", "full", "bfloat16", local)
    name = next(n for n in start if n.endswith("layernorm_before.weight"))
    assert start[name].equal(torch.ones_like(start[name]))
    moved = (half[name] - start[name]).abs()
    assert float(moved.median()) > 20 * 1e-4  # 40 steps of nearly 1e-4 each, most in one direction


def test_float16_trains_heads_alone(folder):
    table = table_for("vit")
    SGD().fits(load(folder("vit"), table, "head", dtype="float16"))
    for adaptation in ("lora", "top_layers", "full"):
        with pytest.raises(InputError, match=r'model\.dtype.*"bfloat16" or "float32"'):
            SGD().fits(load(folder("vit"), table, adaptation, dtype="float16"))


def test_an_experiment_with_float16_is_refused_before_it_runs(folder, tmp_path):
    np.savez(tmp_path / "d.npz", x=np.zeros((12, 12, 12, 3), np.uint8), y=np.arange(12) % 2)
    tables = {
        "data": {"path": str(tmp_path / "d.npz"), "partition": {"name": "iid", "clients": 2}},
        "model": {"name": str(folder("vit")), "dtype": "float16", "adaptation": {"name": "full"}},
        "method": {"name": "fedavg", "rounds": 1},
    }
    with pytest.raises(InputError, match="float16"):
        fedfm.run(tables, tmp_path / "run")
    assert not (tmp_path / "run").exists()
