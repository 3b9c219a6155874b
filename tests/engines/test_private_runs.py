"""Privacy on Flower's engines: the noise has the bits of the local engine with the same secrets."""

import pytest

from fedfm.audits.replay import replay
from fedfm.runtime.run_directory import Run
from processes import experiment, fedfm, here, on_engine

PRIVACY = """[privacy]
unit = "client"
noise_multiplier = 1.0
clip_norm = 0.05
delta = 1e-5
"""


@pytest.mark.release
@pytest.mark.deployment
def test_an_audit_repeats_the_run_on_the_local_engine(tmp_path):
    exp = experiment(tmp_path, method='name = "fedavg"\nrounds = 2', run=PRIVACY)
    result = here("run", exp, "--out", tmp_path / "run", "--engine", "deployment")
    attacks = ("--attack", "update_membership", "--attack", "canaries")
    found = {f["name"]: f for f in here("audit", tmp_path / "run", *attacks)["findings"]}  # it refuses other bits
    assert set(found) == {"update_membership", "canaries"}
    assert (found["canaries"]["verdict"], found["canaries"]["bound"]) == ("holds", result["epsilon"])


COINS = ("fraction = 0.5", "clip_quantile = 0.5")
TURNS = ("fraction = 0.3333333333333333", 'mechanism = "correlated_gaussian"')


@pytest.mark.simulation
@pytest.mark.parametrize("chosen", [COINS, pytest.param(TURNS, marks=pytest.mark.release)])
def test_cohorts_clips_and_correlated_noise_have_the_bits_of_the_local_engine(chosen, tmp_path):
    fraction, more = chosen
    exp = experiment(tmp_path, method=f'name = "fedavg"\nrounds = 6\n{fraction}', run=f"{PRIVACY}{more}\n")
    fedfm("run", exp, "--out", tmp_path / "run", "--engine", "simulation")
    run = Run.open(tmp_path / "run")
    cohorts = [tuple(line["cohort"]) for line in run.metrics() if line["round"]]
    assert len(set(cohorts)) > 1
    replay(run)  # it refuses other bits


RECORDS = """[privacy]
mechanism = "dp_sgd"
unit = "record"
target_epsilon = 8.0
delta = 1e-5
clip_norm = 1.0
"""


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("simulation", marks=pytest.mark.release),
        pytest.param("deployment", marks=pytest.mark.deployment),
    ],
)
def test_dp_sgd_has_the_bits_and_the_epsilon_of_the_local_engine(engine, tmp_path):
    method = 'name = "fedavg"\nrounds = 2\nlocal = { batch_size = 32 }'
    exp = experiment(tmp_path, method=method, adaptation='{ name = "lora", rank = 2 }', run=RECORDS)
    result = on_engine(engine, "run", exp, "--out", tmp_path / "run", "--engine", engine)
    local = here("run", exp, "--out", tmp_path / "local")
    assert result["engine"] == engine
    assert 0 < result["epsilon"] <= 8
    assert result["epsilon"] == local["epsilon"]
    assert result["params_sha256"] != local["params_sha256"]  # each run draws secrets of its own
    replay(Run.open(tmp_path / "run"))  # with the run's secrets; it refuses other bits
