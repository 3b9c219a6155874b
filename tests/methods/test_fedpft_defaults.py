"""FedPFT's defaults, which depend on whether there is a [privacy] table."""

import math

import pytest

import fedfm
from fedfm.cli import main
from fedfm.config.experiment import Experiment
from fedfm.config.toml import to_toml
from small import features

PRIVATE = {"unit": "record", "target_epsilon": 8.0, "delta": 1e-5}


def tables(folder):
    return {
        "data": {"path": str(features(folder, n=600)), "partition": {"name": "iid", "clients": 2}},
        "model": {"name": "features"},
        "method": {"name": "fedpft"},
        "run": {"workers": 1},
    }


def test_a_private_run_sends_one_spherical_component_by_default(tmp_path):
    plain = tables(tmp_path)
    for privacy, given, covariance, components in (
        (None, {}, "diag", 10),
        (PRIVATE, {}, "spherical", 1),
        (PRIVATE, {"covariance": "diag"}, "diag", 1),
        (PRIVATE, {"components": 3, "topology": "chain"}, "spherical", 3),
        (None, {"components": 1}, "diag", 1),
    ):
        table = plain | {"method": plain["method"] | given} | ({"privacy": privacy} if privacy else {})
        experiment = Experiment.from_dict(table)
        method = experiment.to_dict()["method"]
        assert (method["covariance"], method["components"]) == (covariance, components)
        again = Experiment.from_dict(experiment.to_dict()).method
        assert (again.covariance, again.components) == (covariance, components)
    default = fedfm.run(plain | {"privacy": PRIVATE}, tmp_path / "default")
    entry = fedfm.load_run(tmp_path / "default").manifest["ledger"]["entries"][0]
    assert entry["sensitivity"] == pytest.approx(math.sqrt(1 + 0.25**2))  # of counts and sums, no second moments
    assert default["accuracy"] > 0.8


def test_check_and_show_print_what_is_in_force(tmp_path, capsys):
    table = tables(tmp_path) | {"privacy": PRIVATE}
    (tmp_path / "exp.toml").write_text(to_toml(table))
    assert main(["check", str(tmp_path / "exp.toml")]) == 0
    said = capsys.readouterr().out
    assert 'covariance = "spherical"' in said
    assert "components = 1\n" in said
    assert main(["show", "fedpft"]) == 0
    said = capsys.readouterr().out
    assert 'covariance = "diag"' in said
    assert "components = 10" in said
    assert "under [privacy] spherical" in said
    assert "under [privacy] 1" in said
