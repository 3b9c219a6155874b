"""Settings that only the server may know are in nothing that clients receive."""

import json

import pytest

from fedfm.config.experiment import WITHHELD, Experiment
from fedfm.engines.flower import app_writer
from fedfm.errors import InputError

SECRET = "lab/secret-model-7"


def experiment():
    return Experiment.from_dict(
        {
            "data": {"name": "digits"},
            "model": {"name": "nano-vit"},
            "method": {"name": "fedbaf", "foundation": SECRET, "base": {"name": "fedprox", "mu": 0.1}},
        }
    )


def test_clients_receive_all_other_settings():
    e = experiment()
    told = e.for_clients()
    assert SECRET not in told.to_toml()
    assert told.method.foundation == WITHHELD
    assert told.method.base == e.method.base
    assert told.for_server({"foundation": SECRET}).to_dict() == e.to_dict()


def test_a_method_without_secrets_is_sent_unchanged():
    e = Experiment.from_dict({"data": {"name": "digits"}, "model": {"name": "nano-vit"}, "method": {"name": "fedavg"}})
    assert e.for_clients() is e


def test_a_server_that_does_not_know_says_so():
    with pytest.raises(InputError, match=r"method\.foundation: it is withheld"):
        experiment().for_clients().for_server({})


def test_an_app_is_bundled_without_it(tmp_path):
    (tmp_path / "e.toml").write_text(experiment().to_toml())
    app_writer.write(tmp_path / "app", tmp_path / "e.toml")
    assert SECRET not in (tmp_path / "app/pyproject.toml").read_text()
    kept = tmp_path / "app/runs/server-only"
    assert json.loads(kept.read_text()) == {"foundation": SECRET}
    assert kept.stat().st_mode & 0o077 == 0
    assert SECRET.encode() not in b"".join(
        p.read_bytes() for p in (tmp_path / "app").rglob("*") if p.suffix in (".toml", ".py", ".md")
    )
