"""A nearly meaningless guarantee gets a notice before a run and in its manifest."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedfm
from fedfm.cli import main
from fedfm.config.toml import to_toml
from fedfm.errors import InputError
from fedfm.privacy import plausibility
from small import experiment, pictures

RECORD = {"unit": "record", "target_epsilon": 3.0}
DP_SGD = {"unit": "record", "noise_multiplier": 1.0, "mechanism": "dp_sgd", "clip_norm": 1.0}
CLIENT = {"unit": "client", "clip_norm": 1.0, "target_epsilon": 8.0}


@given(st.floats(1e-9, 0.99), st.integers(1, 10**8))
def test_a_delta_of_at_least_1_over_n_is_meaningless(delta, count):
    said = plausibility.of_delta(delta, count, "rows")
    assert (said is None) == (delta * count < 1)
    if said is not None:
        better = float(said.rpartition(" ")[2])
        assert plausibility.of_delta(better, count, "rows") is None
        assert better * count <= 0.1 * (1 + 1e-9)


def test_an_epsilon_of_dozens():
    assert plausibility.of_epsilon(None) is plausibility.of_epsilon(20.0) is None
    assert "e^312 times as certain" in plausibility.of_epsilon(312.0)
    assert "epsilon = inf" in plausibility.of_epsilon(float("inf"))


def said_by(tables, folder, capsys):
    """What ``fedfm check`` and a run say, and what the run keeps for all to read."""
    checked = fedfm_check(tables, folder, capsys)
    result = fedfm.run(tables, folder / "run")
    return checked, capsys.readouterr().err, "\n".join(result["warnings"])


def fedfm_check(tables, folder, capsys):
    (folder / "exp.toml").write_text(to_toml(tables))
    capsys.readouterr()
    assert main(["check", str(folder / "exp.toml"), "--format", "json"]) == 0
    return "\n".join(json.loads(capsys.readouterr().out)["notices"])


@pytest.mark.parametrize(
    ("method", "privacy"),
    [
        ({"name": "fedavg", "rounds": 1}, DP_SGD),
        ({"name": "fedpft"}, RECORD),
        ({"name": "fedavg", "rounds": 1}, CLIENT),
    ],
)
def test_a_large_delta_is_reported_before_the_run(method, privacy, tmp_path, capsys):
    tables = experiment(tmp_path, method=method, privacy=privacy | {"delta": 0.25})
    tables["method"] = method
    checked, shown, public = said_by(tables, tmp_path, capsys)
    for text in (checked, shown):
        assert "privacy.delta = 0.25 with" in text
    # The number of clients is not a secret, that of rows is one.
    assert ("privacy.delta" in public) == (privacy is CLIENT)
    assert "privacy.delta = " not in fedfm_check({**tables, "privacy": privacy | {"delta": 1e-6}}, tmp_path, capsys)


def test_an_epsilon_of_hundreds_is_reported_before_the_run(tmp_path, capsys):
    privacy = {"unit": "client", "clip_norm": 1.0, "noise_multiplier": 0.02, "delta": 1e-5}
    tables = experiment(tmp_path, method={"rounds": 1}, privacy=privacy)
    assert all("guarantees almost nothing" in text for text in said_by(tables, tmp_path, capsys))


@pytest.mark.parametrize("privacy", [CLIENT, CLIENT | {"aggregator": "secagg"}, DP_SGD])
def test_batch_norm_that_trains_is_refused_before_the_first_round(privacy, tmp_path, capsys):
    tables = {
        "data": {"path": str(pictures(tmp_path, n=40)), "partition": {"name": "iid", "clients": 4}},
        "model": {"name": "preact-resnet-small", "weights": "random", "adaptation": {"name": "full"}},
        "method": {"name": "fedavg", "rounds": 1},
        "privacy": privacy | {"delta": 1e-5},
        "run": {"workers": 1},
    }
    with pytest.raises(InputError, match="batch norm"):
        fedfm.run(tables, tmp_path / "run")
    assert not (tmp_path / "run/messages.jsonl").exists() or not (tmp_path / "run/messages.jsonl").read_text()
    (tmp_path / "exp.toml").write_text(to_toml(tables))
    assert main(["check", str(tmp_path / "exp.toml")]) == 2
    assert "batch norm" in capsys.readouterr().err
