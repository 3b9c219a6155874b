"""A client that fails in every round is named at the end, with the reason, whatever it fails at."""

import pytest

import fedfm
from every_method import METHODS, SAMPLE, experiment_of
from fedfm.core.messages import MISSING, Excluded
from fedfm.errors import E_EXCEPTION, SENTENCES, RunError
from fedfm.runtime import failures
from fedfm.runtime.client import Silos
from fedfm.runtime.progress import Progress

KINDS = {"round": ("train", "query", "aggregate"), "scores": ("scores",), "reveal": ("reveal",)}
SECAGG = {"privacy": {"aggregator": "secagg"}}


class Said(Progress):
    """Keeps what a run says."""

    def __init__(self):
        self.texts = []

    def notice(self, text):
        self.texts.append(text)


def check(tables, folder, monkeypatch):
    """A run in which one client fails at every message of its rounds, others at every message of scores and models."""
    broken, answer = {}, Silos._answer

    def fail(self, request):
        part = next(p for p, kinds in KINDS.items() if request.handler.split(".")[0] in kinds)
        taken = {name for p, name in broken.items() if p != part}
        if request.client not in taken and broken.setdefault(part, request.client) == request.client:
            raise ValueError("row 17 is broken")
        return answer(self, request)

    said = Said()
    monkeypatch.setattr(Silos, "_answer", fail)
    result, stopped = None, ""
    try:
        result = fedfm.run(tables, folder / "run", progress=said)
    except RunError as error:
        stopped = str(error)
    if result is None:  # the method cannot do without it
        assert f"{broken['round']}: E_EXCEPTION: ValueError: " in stopped
        return {"round"}
    lines = fedfm.load_run(folder / "run").metrics()
    for part, name in broken.items():
        entries = [e for e in result["excluded"] if (e["client"], e["part"]) == (name, part)]
        reason = SENTENCES[E_EXCEPTION] if "privacy" in tables else "ValueError: row 17 is broken"
        assert {(e["code"], e["reason"].partition(" (")[0]) for e in entries} == {("E_EXCEPTION", reason)}
        told = [text for text in result["warnings"] if text.startswith(f"{name} was {MISSING[part]} ")]
        assert any(f"E_EXCEPTION: {entries[-1]['reason']}" in text for text in told)
        assert set(told) <= set(said.texts)
        at = {m["round"] for m in lines for e in m["excluded"] if (e["client"], e["part"]) == (name, part)}
        assert at == {e["round"] for e in entries}
    return broken.keys()


@pytest.mark.sample(*SAMPLE, "analytic", "average", "ccvr", "fedala", "feddpa", "fedfed")
@pytest.mark.parametrize("name", METHODS)
def test_of_every_method(name, tmp_path, monkeypatch):
    check(experiment_of(name, tmp_path, rounds=2, fraction=1.0), tmp_path, monkeypatch)


def test_of_clients_with_models_of_their_own(tmp_path, monkeypatch):
    assert check(experiment_of("ditto", tmp_path, rounds=2), tmp_path, monkeypatch) == {"round", "scores", "reveal"}


def test_under_secure_aggregation(tmp_path, monkeypatch):
    assert "round" in check(experiment_of("fedavg", tmp_path, rounds=2) | SECAGG, tmp_path, monkeypatch)


def test_a_policy_that_refuses_scores_is_named_and_is_no_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(Silos, "_why_refused", lambda self, kind, name: "not here" if kind == "scores" else None)
    result = fedfm.run(experiment_of("fedavg", tmp_path, rounds=2), tmp_path / "run", progress=Said())
    assert result["excluded"] == []
    assert sum("was left out of the scores in 3 evaluations, E_REFUSED" in text for text in result["warnings"]) == 5


def test_many_are_counted_and_extra_replies_are_no_absence():
    gone = [Excluded(t, f"c{i:02}", "E_TIMEOUT", "late") for t in (1, 2) for i in range(12)]
    extra = Excluded(1, "c99", "E_DUPLICATE", "a second reply to one request")
    found = failures.sentences([*gone, extra], 4)
    assert found[0] == "c00 was left out in 2 of 4 rounds, E_TIMEOUT: late"
    assert found[10:] == ["2 more were left out; `excluded` in the result names each"]
