"""FedMS on Flower's engines: both stages, local experts that stay at the clients, the local engine's bits."""

import json

import pytest

from processes import here, on_engine, same
from tiny_clip import pictures, save

TOML = """
[data]
path = "{place}/rows.npz"
partition = {{ name = "dirichlet", alpha = 0.5, clients = 3 }}

[model]
name = "{place}/model"
task = "zero_shot"
adaptation = {{ name = "lora", rank = 2, dropout = 0.1 }}

[method]
name = "fedms"
global_rounds = 1
local_rounds = 3
queue = 1
threshold = 1.0
gate = "all"
local = {{ learning_rate = 0.01, batch_size = 16 }}

[run]
evaluate_every = 0
"""


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("simulation", marks=pytest.mark.release),
        pytest.param("deployment", marks=pytest.mark.deployment),
    ],
)
def test_both_stages_give_the_same_bits_and_bytes_as_local(tmp_path, engine):
    save("clip", tmp_path / "model")
    pictures(tmp_path / "rows.npz")
    exp = tmp_path / "exp.toml"
    exp.write_text(TOML.format(place=tmp_path))
    found = on_engine(engine, "run", exp, "--out", tmp_path / "there", "--engine", engine)
    local = here("run", exp, "--out", tmp_path / "local")
    same(found, local)
    of = [json.loads((tmp_path / out / "manifest.json").read_text())["result"] for out in ("there", "local")]
    assert of[0]["details"] == of[1]["details"]
    assert max(of[0]["details"]["active_layers"].values()) == 2  # a client's kept expert activates a second layer
