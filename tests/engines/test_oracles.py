"""A server that asks yes-or-no questions about a silo's rows: by refusals, by scores, by rounds, calls and runs.

The silo's own budgets are to bound the number of answers, whatever the server varies; where it sees sums, a part that
cannot be sent is to look like any other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedfm.aggregation._secagg_session import Sum
from fedfm.cli.entry import main
from fedfm.config.experiment import Experiment
from fedfm.config.toml import to_toml
from fedfm.core.client import AGGREGATION_MESSAGE
from fedfm.core.federation import Federation
from fedfm.core.messages import Reply, Request
from fedfm.core.wire import payload
from fedfm.engines.flower import client_host, client_stub
from fedfm.engines.flower.recovery import last_reply
from fedfm.errors import ClientFault
from fedfm.linalg.params import Params
from fedfm.privacy.exposure import HELLO
from fedfm.sites import ledger_summary
from fedfm.sites.request_log import MISFITS
from fedfm.tasks import _label_scores

TRAIN, SCORES = "train.FedAvg_train", "scores.Evaluation_evaluate"
ASKS, REPLIES = "train.Threshold_train", "query.Replying_reply"
CLASSES = ["a", "b", "c"]
HUGE = float(np.finfo(np.float32).max)
FEDAVG = {"name": "fedavg", "rounds": 3, "local": {"learning_rate": 0.5, "batch_size": 8}}
THRESHOLD = {"name": "threshold_method:Threshold", "rounds": 3}
SECAGG = {"privacy": {"aggregator": "secagg"}}


def experiment(**tables: Any) -> dict[str, Any]:
    known = {"data": {"path": "server.npz"}, "model": {"name": "features"}, "method": FEDAVG}
    return known | tables


class Silo:
    """A silo with rows of its own, and a server that sends it what it likes.

    Args:
        tables: of its file, besides its keys.
        keys: of its file.
    """

    def __init__(self, folder: Path, tables: str = "", name: str = "north", **keys: Any) -> None:
        folder.mkdir()
        rng = np.random.default_rng(len(name))
        y = np.arange(60) % 3
        self.x = rng.normal(size=(60, 5)).astype(np.float32) + y[:, None].astype(np.float32)
        np.savez(folder / "rows.npz", x=self.x, y=y, classes=np.array(CLASSES))
        known = {
            "name": name,
            "data": "rows.npz",
            "methods": ["threshold_method:Threshold", "threshold_method:Replying"],
        } | keys
        self.path = folder / "silo.toml"
        text = "\n".join(f"{key} = {json.dumps(value)}" for key, value in known.items())
        self.path.write_text(f"{text}\n{tables}\n")
        self._sites: dict[str, client_host.ClientHost] = {}
        self.heads: list[str] = []

    def run(self, key: str = "run", **tables: Any) -> str:
        """A run of an experiment, after a hello that fits; its key."""
        config = {"experiment": to_toml(experiment(**tables)), "key": key}
        folder = client_stub.admit(config, {"silo": str(self.path)}, 1)
        self._sites[key] = client_host.of_folder(folder)[0]
        assert "name" in self.send(HELLO, {"classes": CLASSES}, 0, 0, key=key)["body"]
        return key

    def send(self, handler: str, body: Any, round: int = 1, call: int = 1, key: str = "run") -> dict[str, Any]:
        head, pieces = payload.encode({"round": round, "call": call, "body": body})
        return self.raw(handler, head, b"".join(pieces), key)

    def raw(self, handler: str, head: str, data: bytes, key: str = "run") -> dict[str, Any]:
        head, data = self._sites[key].answer("", handler, head, data)
        self.heads.append(head)
        return dict(payload.decode(head, data, None))

    def code(self, *args: Any, **more: Any) -> str:
        """The code of the refusal; "" of an answer."""
        told = self.send(*args, **more)
        return str(told["fault"]["code"]) if "fault" in told else ""

    def change(self, x: Any, classes: Sequence[str] = CLASSES) -> None:
        """Other rows, which are read before the next answer."""
        np.savez(self.path.parent / "rows.npz", x=x, y=np.arange(60) % len(classes), classes=np.array(classes))
        self.path.write_text(self.path.read_text() + "# other rows\n")

    @property
    def rows(self) -> torch.Tensor:
        """The rows to train on."""
        (site, *_) = self._sites.values()
        return site.silos.population.data("north").train.tensors["features"]

    def ledger(self, handler: str = "") -> list[dict[str, Any]]:
        lines = (self.path.parent / "silo.ledger.jsonl").read_text().splitlines()
        return [one for one in map(json.loads, lines) if handler in (one["handler"], "")]

    def rounds(self) -> int:
        return int(ledger_summary.report(self.path)["total"]["rounds"])


def head(bias: float, weight: float = 0.0) -> Params:
    """A head whose first class has this bias, and this weight of the first feature."""
    w = torch.zeros(3, 5)
    w[0, 0] = weight
    return Params({"head.weight": w, "head.bias": torch.tensor([bias, 0.0, -1e9 if weight else 0.0])})


def thresholds(t: float) -> Params:
    """A head that says class 0 for rows above t, and class 1 below."""
    return head(-1e4 * t, 1e4)


@pytest.fixture(autouse=True)
def _methods(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_refusal_that_depends_on_rows_counts_as_a_round_and_is_the_same_for_all_rows(tmp_path):
    silo = Silo(tmp_path / "north", "[budget]\nrounds = 3")
    silo.run(method=THRESHOLD)
    asked = [silo.send(ASKS, {"w": head(t)}, call=call) for call, t in enumerate((-1.0, -2.0, 100.0))]
    refusals = [told["fault"] for told in asked if "fault" in told]
    assert refusals == [{"code": "E_EXCEPTION", "reason": "the client half failed; see the site's errors.log"}] * 2
    assert [line["fault"] for line in silo.ledger(ASKS)] == ["E_EXCEPTION", "E_EXCEPTION", ""]
    assert silo.rounds() == 3
    spent = [silo.send(ASKS, {"w": head(t)}, 2)["fault"] for t in (-3.0, 101.0)]
    assert spent[0] == spent[1]  # whatever the rows would have said
    assert "budget.rounds: 3 of 3 is spent" in spent[0]["reason"]
    again = silo.send(ASKS, {"w": head(-2.0)})
    assert again["fault"] == refusals[0]  # a message that was lost is answered again
    assert silo.rounds() == 3
    assert "largest number" in (silo.path.parent / ".fedfm/runs/run/silo/private/errors.log").read_text()


def test_a_single_reply_that_fails_counts_as_well(tmp_path):
    silo = Silo(tmp_path / "north", "[budget]\nrounds = 2")
    silo.run(method={"name": "threshold_method:Replying"})
    codes = [silo.code(REPLIES, {"w": head(t)}, call=i) for i, t in enumerate((-1.0, -2.0, -3.0, 50.0))]
    assert codes == ["E_EXCEPTION", "E_EXCEPTION", "E_REFUSED", "E_REFUSED"]


@pytest.mark.parametrize("budget", ["rounds = 4", "bytes = 7000"])
def test_bisection_by_refusals_ends_with_the_budget_of_all_runs(tmp_path, budget):
    """Rounds, calls and runs are varied; without the budget 40 questions give the largest number to six digits."""
    silo = Silo(tmp_path / "north", f"[budget]\n{budget}")
    low, high, answers = -10.0, 10.0, 0
    for number in range(40):
        key = f"run-{number // 4}"
        if not number % 4:
            try:
                silo.run(key, method=THRESHOLD, run={"seed": number})
            except KeyError:
                break  # no byte is left for a hello
        t = (low + high) / 2
        code = silo.code(ASKS, {"w": head(t)}, number % 4, 7 * number, key=key)
        if code == "E_REFUSED":
            continue
        answers += 1
        low, high = (t, high) if code else (low, t)
    assert 3 <= answers <= 5
    assert abs((low + high) / 2 - float(silo.x[:, 0].max())) > 0.01


def test_an_answer_refused_by_the_budget_of_bytes_counts_as_a_round(tmp_path):
    """The bit is whether there was an answer: so the refusal has a line, and the rounds end."""
    silo = Silo(tmp_path / "north", "[budget]\nbytes = 4600\nrounds = 3")
    silo.run(method={**THRESHOLD, "name": "fedavg"})
    for t in range(8):
        silo.code(TRAIN, {"w": head(float(t))}, call=t)
    assert silo.rounds() <= 3
    assert sum(line["bytes"] for line in silo.ledger()) <= 4600


def test_under_noise_on_clients_an_update_that_is_not_finite_is_no_change_and_no_refusal(tmp_path):
    private = {"mechanism": "gaussian", "unit": "client", "clip_norm": 1.0, "target_epsilon": 8.0, "delta": 1e-5}
    silo = Silo(tmp_path / "north", "[budget]\nrounds = 2")
    silo.run(privacy=private)
    over = HUGE / float(silo.rows[:, 0].abs().max()) * 1.5
    told = silo.send(TRAIN, {"w": head(0.0, over)})
    assert told["body"]["weight"] == 1.0
    assert told["body"]["delta"].norm() == 0.0
    assert silo.ledger(TRAIN)[0]["fault"] == "E_NONFINITE"
    assert silo.code(TRAIN, {"w": head(0.0, 0.9 * over)}, 2, 1) == ""
    assert silo.code(TRAIN, {"w": head(0.0, 1.0)}, 3, 1) == "E_REFUSED"


@pytest.mark.proof
def test_a_refusal_because_rows_changed_is_a_line_and_a_round(tmp_path):
    """The server repeats its message: whether it is refused depends on the rows alone."""
    silo = Silo(tmp_path / "north", "[budget]\nrounds = 2")
    private = {"mechanism": "dp_sgd", "unit": "record", "clip_norm": 1.0, "target_epsilon": 4.0, "delta": 1e-5}
    silo.run(privacy=private, method={"name": "fedavg", "rounds": 2, "local": {"learning_rate": 0.1}})
    assert silo.code(TRAIN, {"w": head(0.0)}) == ""
    silo.change(silo.x + 1)
    assert silo.send(TRAIN, {"w": head(0.0)}, call=2)["fault"]["code"] == "E_REFUSED"
    assert [line["fault"] for line in silo.ledger(TRAIN)] == ["", "E_REFUSED"]
    assert silo.rounds() == 2
    assert silo.code(TRAIN, {"w": head(1.0)}, 2) == "E_REFUSED"  # by the budget
    assert len(silo.ledger(TRAIN)) == 2


def test_a_question_on_which_the_worker_dies_is_a_line_unless_it_is_answered_after_all(tmp_path):
    """That a worker died may depend on rows, as when the longest is too long for the memory."""
    silo = Silo(tmp_path / "north", "[budget]\nrounds = 3")
    silo.run()
    silo.run("other", run={"seed": 3})

    def dies(w, key="run"):
        if (child := os.fork()) == 0:
            silo._sites[key]._value = lambda *given: os._exit(9)
            silo.send(TRAIN, {"w": head(w)}, key=key)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9

    dies(0.0)
    dies(0.0)
    assert silo.code(TRAIN, {"w": head(0.0)}) == ""  # as after any stop
    assert [line["fault"] for line in silo.ledger(TRAIN)] == [""]
    dies(1.0)
    dies(2.0, "other")
    assert silo.code(TRAIN, {"w": head(3.0)}, 2) == "E_REFUSED"
    assert [line["fault"] for line in silo.ledger(TRAIN)] == ["", "E_DIED", "E_DIED"]
    assert silo.rounds() == 3
    assert list((tmp_path / "north/.fedfm/unanswered").iterdir()) == []


def test_a_question_that_is_asked_again_in_other_rounds_costs_what_others_cost(tmp_path, monkeypatch):
    """The round decides the order of the rows, so that equal or not, refused or dead says more of them each time."""
    silo = Silo(tmp_path / "north", "[budget]\nrounds = 3")
    silo.run(method={**FEDAVG, "rounds": 99})
    assert silo.code(TRAIN, {"w": head(0.0)}) == ""
    asked = list[int]()

    def dies(t):
        if (child := os.fork()) == 0:
            silo._sites["run"]._value = lambda *given: os._exit(9)
            silo.send(TRAIN, {"w": head(0.0)}, t)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9

    assert [dies(t) for t in (2, 3, 4, 5)] == [True, True, False, False]
    silo._sites["run"]._value = lambda name, handler, body, at: asked.append(at[0])
    assert {silo.code(TRAIN, {"w": head(0.0)}, t) for t in range(4, 90)} == {"E_REFUSED"}
    assert asked == []  # no row was read
    assert [line["fault"] for line in silo.ledger(TRAIN)] == ["", "E_DIED", "E_DIED"]
    assert silo.rounds() == 3


def test_only_few_runs_learn_whether_the_rows_still_fit(tmp_path):
    """Runs that a silo agreed to may fit changed rows or not: each of them would be a question that costs nothing."""
    silo = Silo(tmp_path / "north")
    keys = [silo.run(f"run-{i}", data={"path": "x.npz", "val_fraction": 0.1 + i / 100}) for i in range(7)]
    silo.change(silo.x, classes=[*CLASSES, "d"])
    told = [silo.code(TRAIN, {"w": head(0.0)}, key=key) for key in [*keys, *keys]]
    assert told == 2 * [*["E_EXPERIMENT"] * MISFITS, "E_REFUSED", "E_REFUSED"]
    silo.change(silo.x)
    assert [silo.code(TRAIN, {"w": head(0.0)}, key=key) for key in keys] == [""] * 7
    assert (tmp_path / "north/.fedfm/silo.log").read_text().count(" no longer fits: ") == 2 * MISFITS


# --- refusals where sums are hidden -----------------------------------------------------------------------------------

NAMES = ("east", "north", "south")


class Agreed:
    """Three silos that agreed on keys with an honest server; ``terms`` are of their files."""

    def __init__(self, folder: Path, terms: str = "", **tables: Any) -> None:
        self.silos = {name: Silo(folder / name, terms, name=name) for name in NAMES}
        for silo in self.silos.values():
            silo.run(**tables)
        found = Experiment.from_dict(experiment(**tables), imports=True)
        (site, *_) = self.silos["north"]._sites.values()
        fed = Federation(self, model=site.silos.population.client_model, aggregator=found.aggregation)
        fed.begin(1)
        found.aggregation.transport._agree(fed)
        self.ask = 0

    clients = NAMES

    def exchange(self, requests: Any) -> Iterator[Reply]:
        for r in requests:
            told = self.silos[r.client].send(r.handler, r.payload, r.round, r.call)
            fault = ClientFault(**told["fault"]) if "fault" in told else None
            yield Reply(r.client, told.get("body"), r.round, r.call, fault=fault)

    def part(self, handler: str, w: Params, size: int = 18) -> str:
        """What north answers of the next sum, without the numbers: its structure, or the code of a refusal."""
        told = Sum(self.ask, torch.ones(3, dtype=torch.uint8), size)
        self.ask += 1
        silo = self.silos["north"]
        code = silo.code(handler, {"w": w, AGGREGATION_MESSAGE: told}, 1, 90 + self.ask)
        return code or silo.heads[-1]


@pytest.mark.parametrize(
    ("tables", "handler", "fails", "works"),
    [
        ({}, TRAIN, head(0.0, HUGE / 1.5), head(0.0)),
        ({"method": THRESHOLD}, ASKS, head(-1.0), head(50.0)),
        ({"method": {**THRESHOLD, "how": "weight"}}, ASKS, head(-1.0), head(50.0)),
        ({"aggregation": {"name": "secure", "bound": 1e-3}, "privacy": None}, TRAIN, head(3.0), head(0.0, HUGE / 1e9)),
    ],
    ids=["not finite", "exception", "weight", "bound"],
)
def test_a_part_that_cannot_be_sent_looks_like_any_other(tmp_path, tables, handler, fails, works):
    tables = {key: value for key, value in (SECAGG | tables).items() if value is not None}
    agreed = Agreed(tmp_path, **tables)
    found = [agreed.part(handler, w) for w in (fails, works, fails)]
    assert "seal" in found[0]
    assert len({*found}) == 1
    faults = [line["fault"] for line in agreed.silos["north"].ledger(handler)]
    assert faults[0]
    assert faults[0] == faults[2]
    log = (tmp_path / "north/.fedfm/silo.log").read_text()
    assert log.count("it sent an empty part of the sum") == sum(bool(fault) for fault in faults)


def test_a_sum_of_another_size_reveals_nothing(tmp_path):
    agreed = Agreed(tmp_path, **SECAGG, method=THRESHOLD)
    assert agreed.part(ASKS, head(-1.0), size=7) == agreed.part(ASKS, head(50.0), size=7)
    for size in (-1, 1 << 40):
        assert agreed.part(ASKS, head(-1.0), size) == agreed.part(ASKS, head(50.0), size) == "E_REFUSED"


SHARES = {"aggregator": "secagg", "mechanism": "distributed_gaussian", "unit": "client", "clip_norm": 1.0}
SHARES |= {"target_epsilon": 8.0, "delta": 1e-5}


def test_a_run_spends_no_more_than_the_epsilon_that_a_silo_requires(tmp_path):
    """Each sum has noise of its own, and a server can ask for more sums than the experiment has rounds."""
    agreed = Agreed(tmp_path, "[require]\nlargest_epsilon = 8.0\nlargest_delta = 1e-5", privacy=SHARES, method=FEDAVG)
    told = [agreed.part(TRAIN, head(0.0)) for _ in range(16)]
    assert ["seal" in one for one in told] == [True] * 3 + [False] * 13
    assert told[3:] == ["E_REFUSED"] * 13
    releases = [line["cost"]["noise_multiplier"] for line in agreed.silos["north"].ledger(TRAIN)]
    rho = sum(1 / (2 * z**2) for z in releases)  # concentrated privacy, by its definition
    assert rho == pytest.approx(3 / (2 * releases[0] ** 2))
    assert (
        "require.largest_epsilon = 8: this run has spent its epsilon"
        in (tmp_path / "north/.fedfm/silo.log").read_text()
    )


def test_shares_of_noise_are_in_an_empty_part_too(tmp_path):
    """Without its share the sum of the others would have less noise than is accounted."""
    agreed = Agreed(tmp_path, privacy=SHARES, method=FEDAVG)
    found = [agreed.part(TRAIN, w) for w in (head(0.0, HUGE / 1.5), head(0.0))]
    assert found[0] == found[1]
    (site, *_) = agreed.silos["north"]._sites.values()
    client = site.silos.client(Request("north", TRAIN, {}, 1, 200))
    client.aggregation_message = Sum(3, torch.ones(3, dtype=torch.uint8), 18)
    empty = site.silos.aggregator.mechanism.blank(client)
    assert empty.weight == 1.0
    assert empty.delta.norm() > 0.5  # noise of z C / sqrt(t) an entry, and no change


# --- scores -----------------------------------------------------------------------------------------------------------


def test_a_round_has_one_request_for_scores_even_without_a_budget(tmp_path):
    silo = Silo(tmp_path / "north")
    silo.run()
    assert silo.code(SCORES, {"w": thresholds(0.0), "part": "test"}) == ""
    assert silo.code(SCORES, {"w": thresholds(0.0), "part": "test"}, 1, 5) == ""  # asked again
    assert silo.code(SCORES, {"w": thresholds(0.1), "part": "test"}, 1, 6) == "E_REFUSED"
    assert silo.code(SCORES, {"w": thresholds(0.1), "part": "val"}, 1, 7) == ""
    for part in ("other", "", "Val", "x" * 300):  # they would be further questions about the same rows
        assert silo.code(SCORES, {"w": thresholds(0.2), "part": part}, 1, 7) == "E_REFUSED"
    assert len(silo.ledger(SCORES)) == 3
    assert silo.code("scores.Evaluation_evaluate_start", {"w": thresholds(0.3), "part": "test"}) == "E_REFUSED"


def test_a_question_of_another_round_is_a_second_question_where_the_round_had_one(tmp_path):
    """The scores are those of the client's own model, which training changes: the answer is another one each time.

    Of a model that all have the answer is the same, which the server knows; so it is given.
    """
    silo = Silo(tmp_path / "north")
    silo.run(method={**FEDAVG, "name": "ditto"})
    for t in (1, 2):
        assert silo.code("train.Ditto_train", {"w": head(float(t))}, t) == ""
        assert silo.code(SCORES, {"w": head(float(t)), "part": "test"}, t, 2) == ""
    assert silo.code("train.Ditto_train", {"w": head(3.0)}, 3) == ""
    codes = [silo.code(SCORES, {"w": head(float(t)), "part": "test"}, 3, 2 + t) for t in (1, 2, 1)]
    assert codes == ["", "E_REFUSED", ""]
    assert [line["fault"] for line in silo.ledger(SCORES)] == [""] * 4  # the refusal came before rows were read
    shared = silo.run("shared")
    codes = [
        silo.code(SCORES, {"w": head(float(t)), "part": "test"}, at, 1, shared) for t, at in ((1, 1), (2, 2), (1, 2))
    ]
    assert codes == ["", "", ""]


def test_a_silo_without_a_budget_gets_a_notice(tmp_path, capsys):
    for number, (tables, endless) in enumerate((("", True), ("[budget]\nrounds = 9", False))):
        silo = Silo(tmp_path / str(number), tables)
        assert main(["silo", "check", str(silo.path)]) == 0
        assert ("has no limit on answers" in capsys.readouterr().out) == endless


def test_scores_are_rounds_of_the_budget_over_rounds_and_runs(tmp_path):
    silo = Silo(tmp_path / "north", "[budget]\nrounds = 5")
    answers = 0
    for number in range(8):
        key = silo.run(
            f"run-{number}", run={"seed": number}, data={"path": "x.npz", "val_fraction": 0.1 + number / 100}
        )
        for t in range(8):
            for part in ("test", "val"):
                answers += silo.code(SCORES, {"w": thresholds(t / 9 + number), "part": part}, t, t, key=key) == ""
    assert silo.rounds() == 5
    assert answers == 14  # two parts of five rounds, and of the start of two runs


def test_no_round_is_answered_that_the_experiment_does_not_have(tmp_path):
    silo = Silo(tmp_path / "north")
    silo.run()
    for t in (4, 9, 10**6):
        for handler, body in ((TRAIN, {"w": head(0.0)}), (SCORES, {"w": head(0.0), "part": "test"})):
            told = silo.send(handler, body, t)["fault"]
            assert told == {"code": "E_REFUSED", "reason": f"round {t}: the experiment ends after round 3"}


def test_scores_have_few_digits_and_nothing_that_no_result_needs(tmp_path):
    silo = Silo(tmp_path / "north")
    silo.run()
    told = silo.send(SCORES, {"w": head(0.3, 0.2), "part": "test"})["body"]
    assert told.keys() == {"n", "accuracy", "loss"}
    assert told["loss"] == round(told["loss"], 4)
    assert told["accuracy"] * told["n"] == pytest.approx(round(told["accuracy"] * told["n"]), abs=1e-9)


LABELS = {"name": "features", "task": "multi_label"}


@pytest.fixture
def labelled(tmp_path):
    """A silo whose rows have several labels."""
    silo = Silo(tmp_path / "north")
    has = np.random.default_rng(0).integers(0, 2, (60, 3))
    np.savez(silo.path.parent / "rows.npz", x=silo.x, y=has, classes=np.array(CLASSES))
    return silo


@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (1e5, 0.0), (1e-4, 0.0), (30.0, -1.7)])
def test_scores_of_several_labels_reveal_no_feature_to_two_digits(labelled, scale, shift):
    """The weights of a label pick a feature, so that its logits are values of the rows."""
    labelled.run(model=LABELS)
    w = Params({"head.weight": scale * torch.eye(3, 5), "head.bias": torch.full((3,), scale * shift)})
    told = labelled.send(SCORES, {"w": w, "part": "test"})["body"]
    (site, *_) = labelled._sites.values()
    x = np.sort(site.silos.population.data("north").test.tensors["features"].numpy()[:, :3], axis=0)
    for c, (logits, with_label, without) in enumerate(_label_scores._by_label(told["ranks"], 3)):
        read = np.sort(np.repeat(logits / scale - shift, with_label + without))
        assert np.abs(read - x[:, c]).max() > 0.01 * np.ptp(x[:, c])


def test_an_answer_depends_on_its_question_and_not_on_an_earlier_one(labelled):
    labelled.run(model={**LABELS, "threshold": "validation"}, data={"path": "server.npz", "val_fraction": 0.2})
    w = Params({"head.weight": torch.eye(3, 5), "head.bias": torch.zeros(3)})
    first = labelled.send(SCORES, {"w": w, "part": "val"})
    for t, threshold in ((1, 0.1), (2, 0.9)):
        chosen = {"threshold": dict.fromkeys(CLASSES, threshold)}
        assert labelled.code(SCORES, {"w": w, "part": "test", "chosen": chosen}, t) == ""
        assert labelled.send(SCORES, {"w": w, "part": "val"}) == first
    lines = [(line["round"], line["part"]) for line in labelled.ledger(SCORES)]
    assert lines == [(1, "val"), (1, "test"), (1, "val"), (2, "test"), (1, "val")]


@pytest.mark.parametrize(
    "chosen",
    [
        {"threshold": {"a": 0.5}},
        {"threshold": dict.fromkeys(CLASSES, 1.5)},
        {"threshold": dict.fromkeys((*CLASSES, "d"), 0.5)},
        {"threshold": dict.fromkeys(CLASSES, 0.5), "name": {}},
        {"name": {}},
    ],
)
def test_a_question_for_scores_sets_nothing_but_thresholds_of_the_labels(labelled, chosen):
    labelled.run(model={**LABELS, "threshold": "validation"}, data={"path": "server.npz", "val_fraction": 0.2})
    w = Params({"head.weight": torch.eye(3, 5), "head.bias": torch.zeros(3)})
    assert labelled.code(SCORES, {"w": w, "part": "test", "chosen": chosen}) == "E_FIELD"
    (site, *_) = labelled._sites.values()
    assert site.silos.population.client_model.task.threshold == "validation"


def test_scores_that_go_along_with_an_update_have_few_digits_too(tmp_path):
    silo = Silo(tmp_path / "north")
    late = {"engine": "deployment", "asynchronous": {"buffer": 1}, "local_scores": True}
    silo.run(run=late)
    metrics = silo.send(TRAIN, {"w": head(0.3, 0.2)})["body"]["metrics"]
    told = {key: value for key, value in metrics.items() if key.startswith("sent/") or "before" in key}
    assert {"sent/test/n", "sent/test/accuracy", "sent/test/loss", "loss_before_aggregation"} <= told.keys()
    assert not any("f1" in key or "balanced" in key for key in told)
    for key, value in told.items():
        assert "accuracy" in key or value == round(value, 4)


@pytest.mark.parametrize(("handler", "body"), [(SCORES, {"part": "test"}), ("query.RowSums_tell", {})])
def test_a_refusal_for_too_few_rows_counts_as_the_answer_in_its_place(tmp_path, handler, body):
    """It tells that the rows are few, and a server chooses the share of test rows in each run."""
    model = {"name": "features", "task": "regression"}
    body = body | ({"w": Params({"head.weight": torch.zeros(2, 5), "head.bias": torch.zeros(2)})} if body else {})
    if body:
        model |= {"scale_targets": False}
    for name, n, fault in (("few", 4, "E_REFUSED"), ("many", 40, "")):
        silo = Silo(tmp_path / name, "[budget]\nrounds = 2", classes=["a", "b"])
        rng = np.random.default_rng(0)
        x, y = rng.normal(size=(n, 5)).astype(np.float32), rng.normal(size=(n, 2))
        np.savez(silo.path.parent / "rows.npz", x=x, y=y, classes=np.array(["a", "b"]))
        codes = []
        for i in range(4):
            key, data = f"run-{i}", {"path": "x.npz", "test_fraction": 0.5 - i / 100}
            config = {"experiment": to_toml(experiment(model=model, data=data, run={"seed": i})), "key": key}
            folder = client_stub.admit(config, {"silo": str(silo.path)}, 1)
            silo._sites[key] = client_host.of_folder(folder)[0]
            assert "name" in silo.send(HELLO, {"classes": ["a", "b"]}, 0, 0, key=key)["body"]
            codes.append(silo.code(handler, body, key=key))
        assert codes == [fault, fault, "E_REFUSED", "E_REFUSED"]
        assert [line["fault"] for line in silo.ledger(handler)] == [fault] * 2
        assert silo.rounds() == 2


# --- updates ----------------------------------------------------------------------------------------------------------


def test_an_update_that_is_equal_for_two_questions_counts_twice(tmp_path):
    """A model that is sure of itself has no gradient: that two answers are equal is an answer."""
    silo = Silo(tmp_path / "north", "[budget]\nrounds = 4")
    silo.run(method={**FEDAVG, "local": {"learning_rate": 0.0 + 1e-30, "batch_size": 8}})
    codes = [silo.code(TRAIN, {"w": head(float(t) * 1e8)}, 1 + t % 3, t) for t in range(8)]
    assert codes == [""] * 4 + ["E_REFUSED"] * 4


def test_a_repeated_message_is_the_same_line_and_free(tmp_path):
    silo = Silo(tmp_path / "north", "[budget]\nrounds = 1")
    silo.run()
    first = silo.send(TRAIN, {"w": head(0.0)})
    for call in range(2, 6):
        assert silo.send(TRAIN, {"w": head(0.0)}, 1, call)["body"]["delta"].sha256() == first["body"]["delta"].sha256()
    assert silo.rounds() == 1
    assert len({(line["asked"], line["sha256"]) for line in silo.ledger(TRAIN)}) == 1


def test_a_server_that_asks_for_an_answer_again_pays_for_its_bytes_only(tmp_path):
    """In asynchronous rounds a server that was stopped refers to its request by a hash."""
    silo = Silo(tmp_path / "north", "[budget]\nrounds = 1")
    late = {"engine": "deployment", "asynchronous": {"buffer": 1}}
    silo.run(run=late)
    sent, pieces = payload.encode({"round": 1, "call": 1, "body": {"w": head(0.0)}})
    data = b"".join(pieces)
    first = silo.raw(TRAIN, sent, data)
    asked = last_reply.reference(last_reply.name_of(TRAIN, sent, data))
    again = silo.send(TRAIN, asked, 2, 3)
    assert again["body"]["delta"].sha256() == first["body"]["delta"].sha256()
    assert silo.rounds() == 1
    assert silo.code(TRAIN, {"w": head(1.0)}, 2) == "E_REFUSED"
    assert silo.send(TRAIN, asked, 3)["body"]["delta"].sha256() == first["body"]["delta"].sha256()
