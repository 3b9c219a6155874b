"""A survey of real silos: their terms, their ledgers, and what happens if a silo's rows cannot be surveyed."""

import contextlib

import numpy as np
import pytest
from test_silo_terms import NAMES, Federation

from fedfm.engines.flower.private_api import identity
from fedfm.errors import InputError, RunError
from fedfm.methods.survey import Survey

SURVEY = {"method": {"name": "survey"}}
SECURE = {"privacy": {"aggregator": "secagg"}}
RECORD = {"unit": "record", "target_epsilon": 3.0, "delta": 1e-5}


@pytest.fixture(autouse=True)
def _identity():
    with identity():
        yield


def rows_of(folder, name):
    """(labels, number) of a silo's training rows: the others are marked as test rows."""
    held = np.load(folder / name / "rows.npz")
    return held["y"][held["split"] == "train"]


def entries(federation, name):
    """The lines of a silo's ledger that depend on its rows."""
    return [line for line in federation.left(name) if line["exposes"] not in ("hello",)]


@pytest.mark.parametrize("tables", [SURVEY, SURVEY | SECURE], ids=["mean", "secure"])
def test_a_survey_is_one_line_of_each_silo_s_ledger(tmp_path, tables):
    federation = Federation(tmp_path)
    result = federation.run(**tables)
    labels = [rows_of(tmp_path, name) for name in NAMES]
    found = result["details"]["survey"]
    assert (found["silos"], found["rows"]) == (3, sum(map(len, labels)))
    assert found["counts"]["targets"]["counts"] == np.bincount(np.concatenate(labels)).tolist()
    for name in NAMES:
        (line,) = [one for one in entries(federation, name) if not one["handler"].startswith("aggregate.")]
        assert (line["handler"], line["exposes"]) == ("train.Survey_sums", "mean")
        assert line["form"] == ("masked" if tables.get("privacy") else "plain")
        assert federation.shown(name)["total"]["rounds"] == 1


def test_by_silo_asks_for_a_reply_and_a_silo_that_allows_means_alone_refuses(tmp_path):
    federation = Federation(tmp_path)
    federation.write("north", allow=["mean"])
    found = federation.run(method={"name": "survey", "by_silo": True})["details"]["survey"]
    assert found["by_silo"].keys() == {"east", "south"}
    assert '"reply" is not in allow' in federation.log("north")
    assert [one["exposes"] for one in entries(federation, "east")] == ["reply"]
    assert federation.run(**SURVEY)["details"]["survey"]["silos"] == 3


def test_a_silo_whose_terms_name_other_methods_takes_no_part(tmp_path):
    federation = Federation(tmp_path)
    federation.write("north", allow_methods=["fedavg"])
    assert federation.run(**SURVEY)["details"]["survey"]["silos"] == 2
    assert 'method.name = "survey"' in federation.log("north")


@pytest.mark.parametrize(
    ("privacy", "mechanism"),
    [(RECORD, "own"), (RECORD | {"aggregator": "secagg", "mechanism": "distributed_gaussian"}, "distributed_gaussian")],
    ids=["own", "shares"],
)
def test_the_ledger_counts_the_epsilon_that_the_survey_states(tmp_path, privacy, mechanism):
    terms = {"budget": {"epsilon": 3.0}, "require": {"mechanism": [mechanism], "largest_epsilon": 3.0}}
    federation = Federation(tmp_path, **terms)
    result = federation.run(**SURVEY, privacy=privacy)
    assert (result["epsilon"], result["excluded"]) == (3.0, [])
    for name in NAMES:
        shown = federation.shown(name)
        assert shown["budget"]["epsilon"]["spent"] == pytest.approx(3.0, rel=1e-6)
        assert shown["total"]["claimed"] is False
    with contextlib.suppress(InputError), pytest.raises(RunError):  # the budget is spent
        federation.run(**SURVEY, privacy=privacy)
    assert federation.shown("east")["budget"]["epsilon"]["spent"] == pytest.approx(3.0, rel=1e-6)


def test_under_secure_sums_a_silo_that_fails_adds_nothing_and_the_sums_are_the_others(tmp_path, monkeypatch):
    real = Survey._message

    def message(self, client):
        if client.id == "north":
            raise ValueError("these rows cannot be surveyed")
        return real(self, client)

    monkeypatch.setattr(Survey, "_message", message)
    federation = Federation(tmp_path)
    found = federation.run(**SURVEY | SECURE)["details"]["survey"]
    labels = np.concatenate([rows_of(tmp_path, name) for name in ("east", "south")])
    assert (found["silos"], found["silos_without_sums"], found["rows"]) == (2, 1, len(labels))
    assert found["counts"]["targets"]["counts"] == np.bincount(labels).tolist()
    assert "empty part of the sum" in federation.log("north")


def test_only_a_silos_own_log_has_its_distance(tmp_path):
    federation = Federation(tmp_path)
    found = federation.run(method={"name": "survey", "tell_silos": True}, **SECURE)["details"]["survey"]
    assert sum(found["silos_by_distance"]["counts"]) == 3
    for name in NAMES:
        assert "this silo's mean of features is at the squared distance" in federation.log(name)
    assert "by_silo" not in found
