"""Real silos in real runs: what they require, what they count as left, and the budgets that hold across runs."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from test_apps import App

from fedfm.cli.entry import main
from fedfm.config.experiment import Experiment
from fedfm.core.wire import flower_records
from fedfm.engines.flower import client_stub
from fedfm.engines.flower.app_writer import experiment_text
from fedfm.engines.flower.client_host import of_folder
from fedfm.engines.flower.private_api import identity
from fedfm.engines.flower.server_app import host
from fedfm.errors import InputError, RunError
from fedfm.runtime.run_directory import Run
from fedfm.sites import ledger_summary
from grid import InProcessGrid
from small import features

NAMES = ("east", "north", "south")


@pytest.fixture(autouse=True)
def _identity():
    with identity():
        yield


class Heard(App):
    """Keeps the heads of its replies."""

    heads: ClassVar[list[str]] = []

    def __call__(self, message: Any, context: Any) -> Any:
        reply = super().__call__(message, context)
        self.heads.append(flower_records.unpack(reply.content)[0])
        return reply


class Federation:
    """Three silos, each with a folder and a file of its own; every run is one of real sites over Flower's messages.

    Args:
        keys: of every silo's file.
    """

    def __init__(self, folder: Path, **keys: Any) -> None:
        self.folder, self.runs = folder, 0
        for number, name in enumerate(NAMES):
            (folder / name).mkdir(parents=True)
            features(folder / name, n=80, seed=number)
            self.write(name, **keys)
        features(folder)

    def write(self, name: str, tables: str = "", **keys: Any) -> None:
        known = {"name": name, "data": "rows.npz"} | keys
        text = "\n".join(f"{key} = {_inline(value)}" for key, value in known.items())
        (self.folder / name / "silo.toml").write_text(f"{text}\n{tables}")

    def run(self, key: str = "", **tables: Any) -> dict[str, Any]:
        """The result line of a run of an experiment."""
        self.runs += 1
        key = key or f"run-{self.runs}"
        known = {"method": {"name": "fedavg", "rounds": 2}, "model": {"name": "features"}}
        known["data"] = {"path": str(self.folder / "rows.npz"), "partition": {"name": "iid", "clients": 3}}
        known["run"] = {"engine": "simulation", "timeout": 20.0}
        experiment = Experiment.from_dict(known | tables)
        apps = {}
        for number, name in enumerate(NAMES):
            config = {"experiment": experiment_text(experiment), "key": key}
            node = {"silo": str(self.folder / name / "silo.toml")}
            site, own = of_folder(client_stub.admit(config, node, 1))
            apps[100 + number] = Heard(site, own)
        self.directory = self.folder / f"out-{self.runs}"
        return host(Run.create(experiment, self.directory), InProcessGrid(apps))

    def messages(self) -> list[dict[str, Any]]:
        """Lines of the last run's messages.jsonl."""
        return [json.loads(line) for line in (self.directory / "messages.jsonl").read_text().splitlines()]

    def left(self, name: str) -> list[dict[str, Any]]:
        """The silo's ledger."""
        return [json.loads(line) for line in (self.folder / name / "silo.ledger.jsonl").read_text().splitlines()]

    def shown(self, name: str) -> dict[str, Any]:
        return ledger_summary.report(self.folder / name / "silo.toml")

    def log(self, name: str) -> str:
        return (self.folder / name / ".fedfm" / "silo.log").read_text()


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_inline(v)}" for key, v in value.items()) + " }"
    return json.dumps(value)


SECAGG = {"privacy": {"aggregator": "secagg"}}
PRIVATE = {
    "method": {"name": "fedpft", "rounds": 1},
    "privacy": {"unit": "record", "target_epsilon": 3.0, "delta": 1e-5},
}


# --- the ledger ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tables", [{}, SECAGG, PRIVATE], ids=["plain", "secagg", "fedpft"])
def test_the_ledger_has_every_message_that_the_server_got_with_its_bytes(tmp_path, tables):
    federation = Federation(tmp_path)
    result = federation.run(**tables)
    got = [m for m in federation.messages() if m["to"] == "server"]
    for name in NAMES:
        lines = federation.left(name)
        assert [(m["round"], m["handler"], m["bytes"]) for m in got if m["from"] == name] == [
            (line["round"], line["handler"], line["bytes"]) for line in lines
        ]
        assert {line["run"] for line in lines} == {"run-1"}
        assert len({line["sha256"] for line in lines}) == len(lines)
        forms = {line["handler"].partition(".")[0]: line["form"] for line in lines}
        assert forms.get("train", "plain") == ("masked" if tables is SECAGG else "plain")
        assert [line["exposes"] for line in lines].count("hello") == 1
        assert federation.shown(name)["total"]["rounds"] == result["rounds"]


def test_the_totals_of_silo_show_add_up(tmp_path, capsys):
    federation = Federation(tmp_path, budget={"bytes": 100_000, "rounds": 50})
    federation.run()
    federation.run(method={"name": "fedprox", "rounds": 3})
    left, found = federation.left("north"), federation.shown("north")
    assert [(one["run"], one["method"], one["rounds"]) for one in found["runs"]] == [
        ("run-1", "fedavg", 2),
        ("run-2", "fedprox", 3),
    ]
    assert found["total"]["bytes"] == sum(line["bytes"] for line in left)
    assert found["total"]["messages"] == len(left) == sum(one["messages"] for one in found["runs"])
    spent = found["total"]["bytes"]
    assert found["budget"] == {
        "bytes": {"spent": spent, "limit": 100_000, "left": 100_000 - spent},
        "rounds": {"spent": 5, "limit": 50, "left": 45},
    }
    path = str(tmp_path / "north" / "silo.toml")
    assert main(["silo", "show", path, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(found))
    assert main(["silo", "show", path]) == 0
    text = capsys.readouterr().out
    for part in ("run-1", "fedprox", f"{spent:,}", "its update, in a mean: 3", "rounds  5", "epsilon none"):
        assert part in text
    for command in (["silo", "check", path], ["silo", path]):
        assert main(command) == 0
        assert "discloses at most rounds = 50 in all runs" in capsys.readouterr().out


def test_show_states_that_a_silo_has_sent_nothing(tmp_path, capsys):
    Federation(tmp_path)
    assert main(["silo", "show", str(tmp_path / "north" / "silo.toml")]) == 0
    assert "north: nothing has left" in capsys.readouterr().out


def test_a_damaged_ledger_is_named_and_nothing_is_answered(tmp_path, capsys):
    federation = Federation(tmp_path)
    federation.run()
    path = tmp_path / "north" / "silo.ledger.jsonl"
    path.write_text("damaged\n" + path.read_text())
    result = federation.run()
    assert result["client_accuracy"].keys() == {"east", "south"}
    assert main(["silo", "show", str(tmp_path / "north" / "silo.toml")]) == 2
    assert "silo.ledger.jsonl: line 1 is damaged" in capsys.readouterr().err


# --- budgets ---------------------------------------------------------------------------------------------------------


def test_rounds_are_counted_over_all_runs_and_the_refusal_is_orderly(tmp_path):
    federation = Federation(tmp_path)
    federation.write("north", budget={"rounds": 3})
    assert federation.run()["excluded"] == []
    result = federation.run()
    assert [(e["round"], e["client"]) for e in result["excluded"]] == [(2, "north")]
    assert "budget.rounds: 3 of 3 is spent, and this answer would spend 1" in result["excluded"][0]["reason"]
    assert federation.shown("north")["budget"]["rounds"] == {"spent": 3, "limit": 3, "left": 0}
    federation.write("north", budget={"rounds": 5})  # its owner allows two more
    assert federation.run()["excluded"] == []


def test_a_server_that_begins_its_run_again_gets_the_same_answers_and_spends_no_round(tmp_path):
    federation = Federation(tmp_path, budget={"rounds": 2})
    first = federation.run("one", run={"engine": "simulation", "timeout": 20.0, "local_scores": True})
    lines = federation.left("north")
    again = federation.run("one", run={"engine": "simulation", "timeout": 20.0, "local_scores": True})
    assert again["excluded"] == []
    assert again["params_sha256"] == first["params_sha256"]
    assert again["client_accuracy"] == first["client_accuracy"]
    known, new = lines, federation.left("north")[len(lines) :]
    told = [[(one["asked"], one["sha256"]) for one in part if one["exposes"] != "hello"] for part in (known, new)]
    assert told[0] == told[1]
    assert federation.shown("north")["total"]["rounds"] == 2


def test_the_model_of_the_best_round_is_scored_a_second_time(tmp_path):
    """In the last round it is another question, to which the server has the answer."""
    federation = Federation(tmp_path, budget={"rounds": 6})
    data = {"path": str(tmp_path / "rows.npz"), "val_fraction": 0.2, "partition": {"name": "iid", "clients": 3}}
    run = {"engine": "simulation", "timeout": 20.0, "patience": 2}
    method = {"name": "fedavg", "rounds": 6, "local": {"learning_rate": 300.0}}
    result = federation.run(data=data, run=run, method=method)
    assert result["details"]["model_of_round"] < result["rounds"]
    assert [name for name, accuracy in result["client_accuracy"].items() if accuracy is None] == []
    assert "is not answered" not in federation.log("north")
    assert federation.shown("north")["total"]["rounds"] == result["rounds"]


def test_bytes_are_counted_over_all_runs(tmp_path):
    federation = Federation(tmp_path)
    federation.run()
    spent = federation.shown("south")["total"]["bytes"]
    federation.write("south", budget={"bytes": spent + 100})
    with pytest.raises(RunError, match=r"2 of 3"):
        federation.run(run={"engine": "simulation", "timeout": 20.0, "min_clients": 3})
    assert federation.shown("south")["total"]["bytes"] == spent


def test_an_epsilon_is_computed_by_the_silo_and_counted_over_all_runs(tmp_path):
    """Two releases of epsilon 3 cost 4.463 together, three 5.66: the closed form of a Gaussian, by scipy."""
    federation = Federation(tmp_path, budget={"epsilon": 5.0})
    for number, spent in enumerate([3.0, 4.4634233]):
        run = {"engine": "simulation", "timeout": 20.0, "seed": number}
        assert federation.run(**PRIVATE, run=run)["excluded"] == []
        shown = federation.shown("east")
        assert shown["budget"]["epsilon"]["spent"] == pytest.approx(spent, rel=1e-6)
        assert shown["total"]["claimed"] is False
    with pytest.raises(RunError):
        federation.run(**PRIVATE)
    last = federation.left("east")[-1]
    assert last["exposes"] == "hello"
    assert "E_REFUSED" in federation.log("east").splitlines()[-1]


ANALYTIC = PRIVATE | {"method": {"name": "analytic"}}
SHARES = {"privacy": PRIVATE["privacy"] | {"aggregator": "secagg", "mechanism": "distributed_gaussian"}}


@pytest.mark.parametrize(
    ("tables", "mechanism", "claimed"),
    [
        (PRIVATE, "own", False),
        (ANALYTIC, "own", False),
        (ANALYTIC | SHARES, "distributed_gaussian", False),
        (PRIVATE | {"method": {"name": "fedpft", "pooled": True}}, "gaussian", True),
    ],
    ids=["fedpft", "analytic", "shares", "pooled"],
)
def test_a_methods_own_noise_is_counted_as_that_of_the_party_that_adds_it(tmp_path, tables, mechanism, claimed):
    """Whatever the party, all of the stated epsilon is on the ledger of every silo, and no more."""
    terms = {"budget": {"epsilon": 3.0}, "require": {"mechanism": [mechanism], "largest_epsilon": 3.0}}
    federation = Federation(tmp_path, **terms)
    assert federation.run(**tables)["excluded"] == []
    for name in NAMES:
        shown = federation.shown(name)
        assert shown["budget"]["epsilon"]["spent"] == pytest.approx(3.0, rel=1e-6)
        assert shown["total"]["claimed"] is claimed


@pytest.mark.proof
def test_private_steps_are_counted_by_the_silos_own_rows(tmp_path):
    """After all rounds the silo has spent what the experiment aims at; a second run would pass the budget."""
    federation = Federation(
        tmp_path, budget={"epsilon": 5.0}, require={"mechanism": ["dp_sgd"], "largest_epsilon": 4.0}
    )
    local = {"learning_rate": 0.1, "epochs": 1, "batch_size": 16}
    tables = {
        "method": {"name": "fedavg", "rounds": 2, "local": local},
        "privacy": {"mechanism": "dp_sgd", "unit": "record", "target_epsilon": 4.0, "delta": 1e-5, "clip_norm": 1.0},
    }
    assert federation.run(**tables)["excluded"] == []
    spent = federation.shown("east")["budget"]["epsilon"]["spent"]
    assert 3.95 < spent <= 4.0
    assert federation.shown("east")["total"]["claimed"] is False
    with pytest.raises(RunError):
        federation.run(**tables)
    assert federation.shown("east")["budget"]["epsilon"]["spent"] <= 5.0


def test_a_budget_of_epsilon_admits_no_experiment_without_one(tmp_path):
    federation = Federation(tmp_path)
    federation.write("north", budget={"epsilon": 8.0})
    assert federation.run()["client_accuracy"].keys() == {"east", "south"}
    assert "budget.epsilon = 8: the experiment states no epsilon" in federation.log("north")
    assert not (tmp_path / "north" / "silo.ledger.jsonl").exists()


# --- requirements ----------------------------------------------------------------------------------------------------

HIDDEN = {"privacy": {"aggregator": "secagg"}}
RECORD = {"method": {"name": "fedpft", "rounds": 1}}
LARGE_DELTA = PRIVATE | {
    "privacy": PRIVATE["privacy"] | {"delta": 0.99}
}  # sigma = 0.1652; by scipy epsilon = 43.37 at 1e-5
TERMS = [  # a term, an experiment that does not meet it, what the log says, one that meets it
    ({"require": {"aggregator": "secagg"}}, {}, 'the experiment has aggregator "plain"', HIDDEN),
    ({"require": {"smallest_cohort": 3}}, {}, "which shows single updates", HIDDEN),
    ({"require": {"unit": "record"}}, {}, "the experiment has no epsilon", PRIVATE),
    ({"require": {"unit": "client"}}, PRIVATE, 'the experiment has unit "record"', None),
    ({"require": {"mechanism": ["own"]}}, {}, "the experiment has no mechanism", PRIVATE),
    ({"require": {"mechanism": ["dp_sgd"]}}, PRIVATE, 'the experiment has mechanism "own"', None),
    ({"require": {"largest_clip": 1.0}}, HIDDEN, "the experiment has no clip_norm", None),
    ({"require": {"least_noise_multiplier": 2.0}}, PRIVATE, "require.least_noise_multiplier = 2.0", None),
    ({"require": {"least_noise_multiplier": 1.0}}, {}, "the experiment has 0", PRIVATE),
    ({"require": {"largest_epsilon": 2.9}}, PRIVATE, "the experiment has epsilon 3", None),
    ({"require": {"largest_epsilon": 3.0}}, {}, "the experiment has none", PRIVATE),
    ({"require": {"largest_epsilon": 3.0}}, LARGE_DELTA, "the experiment has epsilon 43.37", PRIVATE),
    (
        {"require": {"largest_epsilon": 3.0, "largest_delta": 0.1}},
        LARGE_DELTA,
        "the experiment has delta 0.99",
        PRIVATE,
    ),
    ({"require": {"largest_delta": 1e-6}}, PRIVATE, "the experiment has delta 1e-05", None),
    ({"allow_methods": ["fedprox"]}, {}, 'allow_methods is "fedprox"', {"method": {"name": "fedprox", "rounds": 1}}),
    # The experiment names no task, so the rows imply it.
    ({"allow_tasks": ["regression"]}, {}, 'model.task = "classification": allow_tasks is "regression"', None),
    (
        {"allow_tasks": ["classification"]},
        {"model": {"name": "features", "task": "regression"}},
        'model.task = "regression": allow_tasks is "classification"',
        {},
    ),
]


@pytest.mark.parametrize(("term", "bad", "says", "good"), TERMS)
def test_an_experiment_that_promises_less_gets_nothing_and_the_log_says_why(tmp_path, term, bad, says, good):
    federation = Federation(tmp_path)
    federation.write("north", **term)
    with contextlib.suppress(InputError):  # two silos are too few for secure aggregation
        assert federation.run(**bad)["client_accuracy"].keys() == {"east", "south"}
    assert says in federation.log("north")
    assert not (tmp_path / "north" / "silo.ledger.jsonl").exists()
    if good is not None:
        assert federation.run(**good)["excluded"] == []


def test_a_clip_of_secure_aggregation_is_the_silos_own(tmp_path):
    federation = Federation(tmp_path, require={"largest_clip": 0.5})
    hidden = {"aggregation": {"name": "secure", "clip_norm": 0.5}}
    assert federation.run(**hidden)["excluded"] == []


def test_a_term_that_its_owner_adds_holds_in_a_run_that_goes_on(tmp_path):
    """The worker reads the file again when it has changed."""
    federation = Federation(tmp_path)
    federation.run(key="one")
    config = {"experiment": json.loads((tmp_path / "north/.fedfm/runs/one/silo/site.json").read_text())["experiment"]}
    node = {"silo": str(tmp_path / "north" / "silo.toml")}
    site, own = of_folder(client_stub.admit(config | {"key": "one"}, node, 1))
    asked = _request({"w": _params()})
    assert '"fault"' not in site.answer(own, "train.FedAvg_train", *asked)[0]
    federation.write("north", allow=["scores"])
    assert "mean" in site.answer(own, "train.FedAvg_train", *asked)[0]
    federation.write("north", require={"aggregator": "secagg"})
    assert "E_EXPERIMENT" in site.answer(own, "train.FedAvg_train", *asked)[0]
    assert "no longer fits: require.aggregator" in federation.log("north")
    (tmp_path / "north" / "silo.toml").write_text("nonsense")
    assert "the silo's file is wrong" in site.answer(own, "train.FedAvg_train", *asked)[0]
    federation.write("north")
    assert '"fault"' not in site.answer(own, "train.FedAvg_train", *asked)[0]


def _request(body: Any) -> tuple[str, bytes]:
    from fedfm.core.wire import payload

    head, pieces = payload.encode({"round": 1, "call": 7, "body": body})
    return head, b"".join(pieces)


def _params() -> Any:
    import torch

    from fedfm.linalg.params import Params

    return Params({"head.weight": torch.zeros(4, 8), "head.bias": torch.zeros(4)})


# --- what an answer that is none tells -------------------------------------------------------------------------------


def test_a_hidden_update_above_its_bound_is_an_empty_part_and_no_server_sees_it(tmp_path, capsys):
    """A refusal would be a question about rows: a bound below every entry made the client say its largest one."""
    federation = Federation(tmp_path)
    tables = {"aggregation": {"name": "secure", "bound": 1e-9}, "run": {"engine": "simulation", "timeout": 20.0}}
    Heard.heads.clear()
    with pytest.raises(RunError, match="no client had an update that can be sent"):
        federation.run(**tables)
    assert not any('"fault"' in head for head in Heard.heads)
    assert federation.directory.joinpath("manifest.json").read_text().count("E_NORM") == 0
    errors = (tmp_path / "north/.fedfm/runs/run-1/silo/private/errors.log").read_text()
    assert "an entry times its weight is" in errors
    assert "it sent an empty part of the sum (E_NORM), which the server cannot notice" in federation.log("north")
    (line,) = [one for one in federation.left("north") if one["handler"].startswith("train.")]
    assert (line["fault"], line["form"]) == ("E_NORM", "masked")
    assert main(["silo", "show", str(tmp_path / "north" / "silo.toml")]) == 0
    assert "failures 1: refusals, or empty parts of a masked sum" in capsys.readouterr().out


def test_one_empty_part_leaves_the_mean_of_the_others_and_looks_like_any_other(tmp_path):
    """North's rows overflow every update: the sum of three is the mean of the other two, with nobody excluded."""
    federation = Federation(tmp_path)
    rows = dict(np.load(tmp_path / "north" / "rows.npz", allow_pickle=False))
    np.savez(tmp_path / "north" / "rows.npz", **rows | {"x": rows["x"] * (9e14 / abs(rows["x"]).max())})
    Heard.heads.clear()
    method = {"name": "fedavg", "rounds": 1, "local": {"epochs": 20}}
    result = federation.run(**SECAGG, method=method)
    assert result["excluded"] == []
    masked = [json.loads(head) for head in Heard.heads if '"seal"' in head]
    assert len(masked) == 3
    assert all(head == masked[0] for head in masked)
    assert [one["fault"] for one in federation.left("north") if one["handler"].startswith("train.")] == ["E_NORM"]
    two = Experiment.from_dict(
        {
            "data": {"clients": {name: str(tmp_path / name / "rows.npz") for name in ("east", "south")}},
            "model": {"name": "features"},
            "method": method,
        }
    )
    alone = run_local(two, tmp_path / "two")
    assert _final(federation.directory) == pytest.approx(_final(alone), abs=1e-6)


def _final(run: Path) -> Any:
    """The final parameters of a run as one vector."""
    from safetensors.numpy import load_file

    found = load_file(next(run.glob("adapter/*.safetensors")))
    return np.concatenate([found[name].ravel() for name in sorted(found)])


def run_local(experiment: Experiment, out: Path) -> Path:
    import fedfm

    fedfm.run(experiment, out)
    return out


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"require": {"aggregator": "plain"}}, 'require.aggregator = "plain": expected "secagg"'),
        ({"require": {"mechanism": ["magic"]}}, 'require.mechanism[0] = "magic"'),
        ({"require": {"smallest_cohort": -1}}, "require.smallest_cohort = -1"),
        ({"budget": {"epsilon": 0}}, "budget.epsilon = 0.0: expected a number above 0"),
        ({"budget": {"rounds": 1.5}}, "budget.rounds = 1.5"),
        ({"budget": {"byte": 1}}, 'budget.byte: unknown key (did you mean "bytes"?)'),
        ({"allow_methods": ["fedavgg"]}, 'allow_methods: "fedavgg"'),
    ],
)
def test_wrong_terms_are_named(tmp_path, keys, says):
    federation = Federation(tmp_path, **keys)
    with pytest.raises(InputError) as error:
        federation.shown("north")
    assert says in str(error.value)


def test_the_ledger_may_lie_elsewhere(tmp_path):
    federation = Federation(tmp_path)
    (tmp_path / "audit").mkdir()
    federation.write("north", ledger="../audit/north.jsonl")
    federation.run()
    assert federation.shown("north")["ledger"] == str(tmp_path / "audit" / "north.jsonl")
    assert np.isclose(federation.shown("north")["total"]["rounds"], 2)
