"""Client-level privacy on Flower's engines: the noise has the bits of the local engine with the same secret."""

import pytest
from processes import experiment, fedfm

PRIVACY = """[privacy]
unit = "client"
noise_multiplier = 1.0
clip_norm = 0.05
delta = 1e-5
"""


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("simulation", marks=pytest.mark.simulation),
        pytest.param("deployment", marks=pytest.mark.deployment),
    ],
)
def test_an_audit_repeats_the_run_on_the_local_engine(engine, tmp_path):
    exp = experiment(tmp_path, method='name = "fedavg"\nrounds = 2', run=PRIVACY)
    result = fedfm("run", exp, "--out", tmp_path / "run", "--engine", engine)
    found = {f["name"]: f for f in fedfm("audit", tmp_path / "run")["findings"]}  # it refuses other bits
    assert set(found) == {"client_epsilon", "canaries"}
    assert (found["client_epsilon"]["verdict"], found["client_epsilon"]["bound"]) == ("holds", result["epsilon"])
