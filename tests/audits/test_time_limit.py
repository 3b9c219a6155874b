"""The time limit of an audit: cheap attacks run first, findings are kept, and attacks that were left out are named."""

import json
import signal
import time

import pytest

import fedfm
from fedfm.audits import audit, steps
from fedfm.audits.audit import audits, perform, perform_within
from fedfm.audits.head_rows import HeadRows
from fedfm.audits.label_counts import LabelCounts
from fedfm.audits.model_membership import ModelMembership
from fedfm.audits.replay import open_finished
from fedfm.cli import main
from fedfm.errors import InputError, RunError
from fedfm.runtime.population import populate
from fedfm.runtime.progress import AuditProgress
from small import experiment, features

NAMES = {"model_membership", "update_membership", "label_counts", "head_rows", "repeated_questions"}


@pytest.fixture
def run(tmp_path):
    features(tmp_path)
    fedfm.run(experiment(tmp_path), tmp_path / "run")
    return tmp_path / "run"


def stop(error):
    raise error


def stored(run):
    return {f["name"] for f in json.loads((run / "audit.json").read_text())["findings"]}


def test_cheap_attacks_are_first_and_a_long_one_has_a_replay_of_its_own(run, monkeypatch):
    monkeypatch.setattr(LabelCounts, "seconds", lambda *args: 500.0)
    monkeypatch.setattr(ModelMembership, "seconds", lambda *args: 0.1)
    known = open_finished(run)
    chosen = {name: audits()[name] for name in sorted(NAMES)}
    planned = steps.steps(known, populate(known.experiment), chosen)
    assert [s.seconds for s in planned] == sorted(s.seconds for s in planned)
    assert planned[0].names == ["model_membership"]
    assert (planned[-1].names, planned[-1].replays) == (["label_counts"], True)
    assert sorted(name for s in planned for name in s.names) == sorted(NAMES)


def test_at_the_limit_findings_are_kept_and_the_rest_is_named(run, monkeypatch, capsys):
    monkeypatch.setattr(ModelMembership, "seconds", lambda *args: 500.0)
    monkeypatch.setattr(ModelMembership, "findings", lambda *args, **options: stop(steps.TimeUpError))
    assert main(["audit", str(run), "--time-limit", "10000", "--format", "json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out.splitlines()[-1])
    assert result["not_run"] == ["model_membership"]
    done = {f["name"].removesuffix("_tpr") for f in result["findings"]}
    assert done
    assert done | set(result["not_run"]) == NAMES
    assert {name.removesuffix("_tpr") for name in stored(run)} == done
    assert f"fedfm audit {run} --attack" in err
    assert "attack: " in err


def test_the_alarm_interrupts_what_computes_and_leaves_no_trace():
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(steps.TimeUpError), steps.until(time.monotonic() + 0.02):
        time.sleep(600)
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    with steps.until(None), steps.until(time.monotonic() + 1000):
        pass
    with pytest.raises(steps.TimeUpError), steps.until(time.monotonic() - 1):
        raise AssertionError("its time was up")


def test_a_limit_that_leaves_nothing_is_an_error_and_a_wrong_one_is_refused(run):
    with pytest.raises(RunError, match="no attack ended within 1e-06 s"):
        perform_within(1e-6, run)
    for limit in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(InputError, match="expected a positive number of seconds"):
            perform_within(limit, run)


def test_ctrl_c_keeps_what_was_found_and_says_how_to_go_on(run, monkeypatch, capsys):
    monkeypatch.setattr(HeadRows, "findings", lambda *args, **options: stop(KeyboardInterrupt))
    monkeypatch.setattr(HeadRows, "seconds", lambda *args: 500.0)
    assert main(["audit", str(run), "--attack", "label_counts", "--attack", "head_rows"]) == 130
    assert f"for the other attacks run: fedfm audit {run} --attack head_rows" in capsys.readouterr().err
    assert stored(run) == {"label_counts"}
    assert "label_counts" in (run / "report.html").read_text()


def test_every_attack_is_announced_with_its_cost(run):
    told = []

    class Told(AuditProgress):
        def started(self, attacks):
            told.append(attacks)

        def done(self):
            told.append("done")

    said = []
    perform_within(None, run, ["head_rows", "label_counts"], said.append, progress=Told())
    assert told == [2, "done", "done"]
    for name in ("head_rows", "label_counts"):
        assert any(name in text and " s" in text for text in said)


def test_findings_on_other_parameters_are_dropped_and_not_shown(run):
    perform(run, ["head_rows"])
    fedfm.resume(run, rounds=5)
    assert "The run continued after its audit" in (run / "report.html").read_text()
    assert "audits" not in json.loads((run / "manifest.json").read_text())
    perform(run, ["label_counts"])
    assert stored(run) == {"label_counts"}
    assert audit.earlier(run) != []
