"""A server that sends what it likes to a silo's real site: what it gets, and what it cannot make the silo do.

No answer in this file may hold a path of the silo's machine: :meth:`Server.send` looks at each.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedfm.config.experiment import Experiment
from fedfm.config.toml import to_toml
from fedfm.core.wire import codec, flower_records, payload
from fedfm.engines.flower import apps, client_host, client_stub, client_worker, loopback
from fedfm.engines.flower.private_api import identity
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.models.load import load_model
from fedfm.models.spec import ModelSpec
from fedfm.privacy.exposure import HELLO
from fedfm.runtime import own_rows
from fedfm.sites import request_log, silo_config, silo_session
from small import tiny_vit

CLASSES = ["no", "yes"]
MONTHS = ["April", "June", "May"]
EXPERIMENT: dict[str, Any] = {
    "data": {"path": "server.csv"},
    "model": {"name": "features"},
    "method": {"name": "fedavg", "rounds": 3},
}


def experiment(**change: Any) -> str:
    """The text of an experiment; what parsing at the server would refuse is written all the same."""
    tables = {name: {**EXPERIMENT.get(name, {}), **change.get(name, {})} for name in {**EXPERIMENT, **change}}
    return to_toml(tables)


def silo(folder: Path, **more: Any) -> Path:
    """A silo's file, beside feature vectors with a label and no other secret than that label's classes."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    y = np.arange(30) % len(CLASSES)
    np.savez(folder / "rows.npz", x=rng.normal(size=(30, 4)).astype(np.float32), y=y, classes=np.array(CLASSES))
    keys = {"name": "north", "data": "rows.npz"} | more
    path = folder / "silo.toml"
    path.write_text("\n".join(f"{key} = {json.dumps(value)}" for key, value in keys.items()))
    return path


class Server:
    """Plays the server against one silo: configures a run as it likes and sends messages to the silo's site.

    Args:
        silo: the silo's file.
        text: the experiment that the run's configuration tells.
        key: the run's key.
    """

    def __init__(self, silo: Path, text: Any = None, *, key: str = "run", **config: Any) -> None:
        self.node = {"silo": str(silo)}
        self.config = {"experiment": experiment() if text is None else text, "key": key, **config}
        self.home = silo.parent

    def send(self, handler: str, body: Any, round: Any = 1, call: Any = 1) -> dict[str, Any]:
        """The reply's envelope, from the site that the silo's worker would be."""
        head, pieces = payload.encode({"round": round, "call": call, "body": body})
        return self.raw(handler, head, b"".join(pieces))

    def raw(self, handler: str, head: str, data: bytes) -> dict[str, Any]:
        """:meth:`send` for the bytes of a message."""
        try:
            folder = client_stub.admit(self.config, self.node, 1)
            answer = client_host.of_folder(folder)[0].answer("", handler, head, data)
        except client_host.ClientFault as fault:
            answer = client_stub.fault_halves(fault, head, data)
        told = payload.decode(*answer, None)
        assert str(self.home) not in json.dumps(told, default=str)
        return told

    def hello(self, classes: Any = CLASSES) -> str:
        """What came of a hello: "fits", or the fault's code."""
        told = self.send(HELLO, {"classes": classes}, 0, 0)
        return told["fault"]["code"] if "fault" in told else "fits"

    def train(self, round: int = 1) -> dict[str, Any]:
        """A round of FedAvg, with the model that a server of the same experiment has."""
        import torch

        w = Params({"head.weight": torch.zeros(2, 4), "head.bias": torch.zeros(2)})
        return self.send("train.FedAvg_train", {"w": w}, round)


def log_of(silo: Path) -> str:
    return (silo.parent / ".fedfm" / "silo.log").read_text()


def test_an_honest_server_gets_an_update(tmp_path):
    server = Server(silo(tmp_path))
    assert server.hello() == "fits"
    assert server.train()["body"]["weight"] == 24.0
    assert "takes part in run run: method fedavg, model features" in log_of(tmp_path / "silo.toml")


# --- 1. code ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """A module that can be imported, and leaves a mark when it is."""
    folder = tmp_path / "modules"
    folder.mkdir()
    mark = tmp_path / "mark"
    (folder / "evil_module.py").write_text(
        "import pathlib\n"
        f"pathlib.Path({str(mark)!r}).touch()\n"
        "from dataclasses import dataclass\n"
        "from fedfm.methods.fedavg import FedAvg\n"
        "@dataclass(frozen=True)\n"
        "class Evil(FedAvg):\n    pass\n"
    )
    (folder / "plugin-1.0.dist-info").mkdir()
    (folder / "plugin-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    points = "[fedfm.methods]\nplugged = evil_module:Evil\n"
    (folder / "plugin-1.0.dist-info" / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr("fedfm.config.registry._admitted", {})
    yield mark
    sys.modules.pop("evil_module", None)


NAMED = [
    {"method": {"name": "evil_module:Evil"}},
    {"method": {"name": "plugged"}},
    {"method": {"name": "unittest.__main__:x"}},
    {"method": {"name": "antigravity:x"}},
    {"method": {"name": "fedbaf", "foundation": "nano-vit", "base": {"name": "evil_module:Evil"}}},
    {"aggregation": {"name": "evil_module:Evil"}},
    {"attack": {"name": "evil_module:Evil"}},
]


@pytest.mark.parametrize("change", NAMED)
def test_an_experiment_imports_nothing_at_a_silo(tmp_path, evil, change):
    server = Server(silo(tmp_path / "silo"), experiment(**change))
    assert server.hello() == "E_EXPERIMENT"
    assert server.train()["fault"]["code"] == "E_REFUSED"
    assert not evil.exists()


@pytest.mark.parametrize("change", NAMED)
def test_parsing_an_experiment_never_imports(evil, change):
    with pytest.raises(InputError):
        Experiment.from_dict({**EXPERIMENT, **change})
    assert not evil.exists()


@pytest.mark.parametrize("name", ["evil_module:Evil", "plugged"])
def test_a_silo_admits_the_methods_that_its_file_lists(tmp_path, evil, name):
    server = Server(silo(tmp_path / "silo", methods=[name]), experiment(method={"name": name}))
    assert server.hello() == "fits"
    assert evil.exists()


def test_the_owner_of_a_process_may_name_any_class(tmp_path, evil):
    path = tmp_path / "exp.toml"
    path.write_text(experiment(method={"name": "evil_module:Evil"}))
    assert type(Experiment.load(path).method).__name__ == "Evil"


# --- 2. data by question ---------------------------------------------------------------------------------------------


def with_months(folder: Path, **more: Any) -> Path:
    """Texts with a label that the silo gives, and a column that it does not."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [f"word{i},{CLASSES[i % 2]},{MONTHS[i % 3]}" for i in range(30)]
    (folder / "rows.csv").write_text("text,label,month\n" + "\n".join(rows))
    return silo(folder, data="rows.csv", **more)


def test_which_column_is_the_label_is_the_silos_to_say(tmp_path):
    for label, classes in (("month", MONTHS), ("text", ["word1"]), ("label", MONTHS)):
        text = experiment(data={"label": label}, model={"name": "nano-gpt2"})
        server = Server(with_months(tmp_path / f"{label}{len(classes)}"), text)
        assert server.hello(classes) == "E_EXPERIMENT"


def test_every_month_cannot_be_listed(tmp_path):
    path = with_months(tmp_path)
    answers = set()
    for number, guess in enumerate([*MONTHS, "March", "July", "August", "October"]):
        text = experiment(data={"label": "month"}, model={"name": "nano-gpt2"})
        answers.add(Server(path, text, key=f"run-{number}").hello([guess, "other"]))
    assert answers == {"E_EXPERIMENT", "E_REFUSED"}  # of a month that is there as of one that is not
    assert log_of(path).count("a hello did not fit") == request_log.MISFITS
    assert "no hello is answered from here on, until silo.toml is changed" in log_of(path)
    honest = experiment(model={"name": "nano-gpt2"})
    assert Server(path, honest, key="honest").hello() == "E_REFUSED"
    path.write_text(path.read_text() + "\n# looked at\n")
    assert Server(path, honest, key="honest").hello() != "E_REFUSED"


def test_the_same_question_counts_once_and_a_fit_does_not_count(tmp_path):
    path = silo(tmp_path)
    for number in range(2 * request_log.MISFITS):
        assert Server(path, key=f"run-{number}").hello(["a", "b"]) == "E_EXPERIMENT"
    for number in range(2 * request_log.MISFITS):
        assert Server(path, experiment(run={"seed": number}), key=f"fit-{number}").hello() == "fits"


def test_two_silos_do_not_share_a_folder(tmp_path, capsys):
    """One would answer with the rows of the other, and a hello to one would set back the other's count."""
    north, south = silo(tmp_path), tmp_path / "south.toml"
    south.write_text(north.read_text().replace("north", "south"))
    assert Server(north).hello() == "fits"
    assert Server(south).hello() == "E_REFUSED"
    assert "north" not in str(Server(south).send(HELLO, {"classes": CLASSES}, 0, 0))
    assert "silo.toml in the same folder uses .fedfm: give each silo a folder of its own" in capsys.readouterr().err
    north.unlink()  # its owner has renamed it
    south.write_text(south.read_text().replace("south", "north"))
    assert Server(south, key="another").hello() == "fits"


def test_a_hello_that_kills_the_worker_counts(tmp_path, monkeypatch):
    path = silo(tmp_path)

    def killed(*_):
        raise KeyboardInterrupt  # past every except in the site

    monkeypatch.setattr(silo_session, "populate", killed)
    for number in range(request_log.MISFITS):
        with pytest.raises(KeyboardInterrupt):
            Server(path, experiment(run={"seed": number}), key=str(number)).hello()
    monkeypatch.undo()
    assert Server(path, key="again").hello() == "E_REFUSED"


def test_a_count_that_cannot_be_kept_is_no_answer(tmp_path):
    path = silo(tmp_path)
    (tmp_path / ".fedfm").mkdir()
    (tmp_path / ".fedfm" / "hello.json").write_text("{damaged")
    assert Server(path).hello() == "E_EXCEPTION"


def test_hello_is_subject_to_the_policy(tmp_path):
    server = Server(silo(tmp_path, allow=[]))
    assert server.hello() == "E_REFUSED"
    assert server.train()["fault"]["code"] == "E_REFUSED"
    assert not silo_config.report(tmp_path / "silo.toml")["takes_part"]


def test_no_request_is_answered_before_a_valid_hello(tmp_path):
    server = Server(silo(tmp_path))
    assert server.train()["fault"]["code"] == "E_REFUSED"
    assert server.hello(["a", "b"]) == "E_EXPERIMENT"
    assert server.train()["fault"]["code"] == "E_REFUSED"


def test_classes_that_the_silo_agreed_to_are_answered_by_the_list_alone(tmp_path):
    agreed = ["maybe", "no", "yes"]
    path = silo(tmp_path, classes=agreed)
    assert Server(path, key="1").hello(agreed) == "fits"
    assert Server(path, key="2").hello(CLASSES) == "E_EXPERIMENT"  # those of the rows are not told either
    update = Server(path, key="1").send("train.FedAvg_train", {"w": head(3)})
    assert float(update["body"]["delta"]["head.bias"].sum()) == pytest.approx(0, abs=1e-5)
    assert update["body"]["delta"]["head.weight"].shape == (3, 4)
    short = silo(tmp_path / "short", classes=["maybe", "yes"])
    assert Server(short).hello(["maybe", "yes"]) == "E_EXPERIMENT"
    assert 'rows of class "no", which is not in classes' in log_of(short)


def head(classes: int) -> Params:
    import torch

    return Params({"head.weight": torch.zeros(classes, 4), "head.bias": torch.zeros(classes)})


def test_the_classes_of_a_run_do_not_change(tmp_path):
    server = Server(silo(tmp_path))
    assert server.hello() == "fits"
    assert server.hello(CLASSES[::-1]) == "E_EXPERIMENT"  # the same noise on other rows would cancel
    assert server.hello() == "fits"


# --- 3. paths and downloads ------------------------------------------------------------------------------------------


def test_models_that_the_silo_does_not_list_are_not_looked_for(tmp_path):
    there = tiny_vit(tmp_path)
    answers = []
    for number, name in enumerate((there, tmp_path / "absent", "/etc", "org/model")):
        server = Server(silo(tmp_path / str(number)), experiment(model={"name": str(name)}))
        answers.append(server.send(HELLO, {"classes": CLASSES}, 0, 0)["fault"])
        assert "it lists none" in log_of(tmp_path / str(number) / "silo.toml")
    assert all(answer == answers[0] for answer in answers)


def test_a_model_that_the_silo_lists_is_its_own_copy(tmp_path):
    spec = ModelSpec("/home/operator/models/tiny-vit")
    there = tiny_vit(tmp_path)
    mine = silo_config.load(silo(tmp_path / "silo", models=["../tiny-vit", "org/other"]))
    assert mine.models == (str(there.resolve()), "org/other")
    assert own_rows.listed_model(mine.rows, spec).name == str(there.resolve())
    assert own_rows.listed_model(mine.rows, ModelSpec("org/other")).name == "org/other"
    assert own_rows.listed_model(mine.rows, ModelSpec("nano-vit")).name == "nano-vit"
    with pytest.raises(InputError, match="does not list this model"):
        own_rows.listed_model(mine.rows, ModelSpec("org/another"))


def test_rows_are_read_from_nowhere_else(tmp_path):
    secret = silo(tmp_path / "secret").parent / "rows.npz"
    for key, data in enumerate(({"path": str(secret)}, {"hub": str(tmp_path)}, {"clients": {"north": str(secret)}})):
        text = experiment()
        text = text.replace('path = "server.csv"', "\n".join(f"{k} = {_inline(v)}" for k, v in data.items()))
        server = Server(silo(tmp_path / f"silo{key}"), text)
        secret.unlink(missing_ok=True)
        assert server.hello() == "fits"


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_inline(v)}" for k, v in value.items()) + " }"
    return json.dumps(value)


@pytest.mark.parametrize("node", [{"partition-id": 0}, {"client": "north"}, {}])
@pytest.mark.parametrize("site", [True, False])
def test_a_node_without_a_silos_file_answers_only_a_rehearsal_of_its_own_machine(tmp_path, monkeypatch, node, site):
    monkeypatch.setenv("HOME", str(tmp_path))
    server = Server(silo(tmp_path))
    server.node = {**node, **({"site": str(tmp_path / "site")} if site else {})}
    assert server.hello() == "E_REFUSED"
    assert not (tmp_path / "site").exists()
    assert not (tmp_path / ".fedfm").exists()


def test_a_silo_downloads_nothing_unless_its_file_says_so(tmp_path):
    for downloads, expected in ((None, False), (False, False), (True, True)):
        path = silo(tmp_path / str(downloads), **({} if downloads is None else {"downloads": downloads}))
        server = Server(path)
        folder = client_stub.admit(server.config, server.node, 1)
        assert client_worker._downloads(folder) is expected
        path.write_text("damaged = ")
        assert not client_worker._downloads(folder)


@pytest.mark.parametrize("key", ["test_fraction", "val_fraction"])
def test_an_experiment_cannot_leave_a_silo_few_rows_to_train_on(tmp_path, key):
    assert Server(silo(tmp_path), experiment(data={key: 0.96})).hello() == "E_EXPERIMENT"


def test_a_silo_takes_no_part_in_what_needs_all_parties_in_one_place(tmp_path):
    """BlindFed without encryption asks for the rows themselves; the server writes another engine than it has."""
    path = silo(tmp_path / "silo")
    hidden = {"name": "blindfed", "encryption": "clear", "foundation": "nano-vit-fhe"}
    methods = [hidden, hidden | {"protocol": "permuted"}, {"name": "centralised"}]
    for number, method in enumerate(methods):
        tables = {"data": EXPERIMENT["data"], "method": method, "run": {"engine": "local"}}
        if method["name"] == "centralised":
            tables["model"] = EXPERIMENT["model"]
        assert Server(path, to_toml(tables), key=str(number)).hello() == "E_EXPERIMENT"
    assert log_of(path).count("is for parties in one place") == len(methods)
    path.write_text(path.read_text() + "\n")  # the count of hellos that do not fit begins again
    assert Server(path, key="an honest run").hello() == "fits"


def test_an_update_carries_no_scores_that_the_policy_forbids(tmp_path):
    text = experiment(run={"local_scores": True})
    assert Server(silo(tmp_path / "a", allow=["mean"]), text).hello() == "E_EXPERIMENT"
    assert Server(silo(tmp_path / "b", allow=["mean", "scores"]), text).hello() == "fits"
    by_method = silo(tmp_path / "c", allow=["mean", "scores"])
    by_method.write_text(by_method.read_text() + '\n[allow_by_method]\nfedavg = ["mean"]')
    assert Server(by_method, text).hello() == "E_EXPERIMENT"


def test_an_asynchronous_update_carries_the_scores_that_the_policy_allows(tmp_path):
    """They are those that the silo would answer if it were asked for them."""
    late = {"run": {"asynchronous": {"buffer": 2}}, "data": {"val_fraction": 0.2}}
    server = Server(silo(tmp_path / "a", allow=["mean", "scores"]), experiment(**late))
    assert server.hello() == "fits"
    told = {k: v for k, v in server.train()["body"]["metrics"].items() if k.startswith("sent/")}
    for part in ("test", "val"):
        asked = server.send("scores.Evaluation_evaluate", {"w": W, "part": part}, 1, 2)["body"]
        known = {f"sent/{part}/{key}": value for key, value in asked.items() if value is not None}
        assert {k: v for k, v in told.items() if f"/{part}/" in k} == known
        assert {f"sent/{part}/{key}" for key in ("n", "accuracy", "loss")} <= known.keys()
    for name, allow, run in (("b", ["mean"], {}), ("c", ["mean", "scores"], {"evaluate_every": 0})):
        other = Server(silo(tmp_path / name, allow=allow), experiment(**(late | {"run": late["run"] | run})))
        assert other.hello() == "fits"
        assert not any(k.startswith("sent/") for k in other.train()["body"]["metrics"])


def test_a_site_scores_as_often_as_the_experiment_says(tmp_path):
    run = {"asynchronous": {"buffer": 2}, "evaluate_every": 3}
    server = Server(silo(tmp_path), experiment(run=run, method={"name": "fedavg", "rounds": 9}))
    assert server.hello() == "fits"
    site, scored = client_host.of_folder(client_stub.admit(server.config, server.node, 1))[0], []
    for t in (1, 2, 3, 4, 6, 8):
        head_, pieces = payload.encode({"round": t, "call": 1, "body": {"w": W}})
        told = payload.decode(*site.answer("", "train.FedAvg_train", head_, b"".join(pieces)), None)
        scored += [t] * any(k.startswith("sent/") for k in told["body"]["metrics"])
    assert scored == [1, 4, 8]


W = head(2)
EXPOSING = {  # a message of each kind: method, handler, payload
    "mean": ("fedavg", "train.FedAvg_train", {"w": W}),
    "reply": ("fedamp", "query.FedAMP_train", {"u": W}),
    "scores": ("fedamp", "scores.Evaluation_evaluate", {"w": W, "part": "test"}),
    "reveal": ("fedamp", "reveal.Evaluation_reveal", {"w": W}),
}


@pytest.mark.parametrize("word", EXPOSING)
def test_a_silo_answers_what_its_words_allow_and_refuses_the_rest(tmp_path, word):
    path = silo(tmp_path, allow=[word])
    for other, (method, handler, body) in EXPOSING.items():
        server = Server(path, experiment(method={"name": method, "rounds": 3}), key=method)
        assert server.hello() == "fits"
        told = server.send(handler, body)
        if other == word:
            assert "fault" not in told
            assert told["body"]
        else:
            reason = f'this silo\'s policy does not allow {handler}: "{other}" is not in allow'
            assert told["fault"] == {"code": "E_REFUSED", "reason": reason}
            assert f"{handler} is not answered: E_REFUSED" in log_of(path)


def test_under_an_epsilon_a_silo_gives_no_scores_and_no_model_whatever_its_words(tmp_path):
    path = silo(tmp_path, allow=list(EXPOSING))
    private = {"unit": "client", "noise_multiplier": 1.0, "clip_norm": 1.0, "delta": 1e-5}
    server = Server(path, experiment(method={"name": "fedavg", "rounds": 3}, privacy=private))
    assert server.hello() == "fits"
    for word in ("scores", "reveal"):
        _, handler, body = EXPOSING[word]
        assert server.send(handler, body)["fault"]["code"] == "E_REFUSED"
    assert "fault" not in server.send("train.FedAvg_train", {"w": W})


SECAGG = {"aggregator": "secagg"}
WITHHELD = {"name": "fedpft", "rounds": 1, "components": 1, "counts": "withheld", "samples": 50}


@pytest.mark.parametrize(
    ("method", "privacy", "scored", "revealed"),
    [
        ({"name": "fedavg", "rounds": 3}, None, True, True),
        ({"name": "fedavg", "rounds": 3}, SECAGG, False, False),
        ({"name": "ditto", "rounds": 3}, SECAGG, True, False),
        ({"name": "fedpft", "rounds": 1, "components": 1}, None, True, True),
        (WITHHELD, None, False, True),
        ({"name": "survey", "rounds": 1}, None, False, True),
    ],
    ids=["fedavg", "secagg", "secagg-ditto", "fedpft", "withheld", "survey"],
)
def test_a_silo_answers_no_request_that_its_experiment_excludes(tmp_path, method, privacy, scored, revealed):
    """Scores contain a number of rows: no words of a silo's let a server ask for them in a run that hides it."""
    server = Server(silo(tmp_path, allow=list(EXPOSING)), experiment(method=method, **without_none(privacy=privacy)))
    assert server.hello() == "fits"
    for word, told in (("scores", scored), ("reveal", revealed)):
        _, handler, body = EXPOSING[word]
        assert ("body" in server.send(handler, body)) == told


def without_none(**tables: Any) -> dict[str, Any]:
    return {key: value for key, value in tables.items() if value is not None}


AROUND = {"name": "fedbaf", "rounds": 3, "foundation": "nano-vit", "base": {"name": "fedprox"}}


def test_a_method_inside_another_one_needs_its_own_permission(tmp_path):
    """Its halves answer, so that a name in front of it would make each list of methods empty."""
    for name, listed, said in (("a", ["fedbaf"], "E_EXPERIMENT"), ("b", ["fedbaf", "fedprox"], "fits")):
        path = silo(tmp_path / name, allow_methods=listed)
        assert Server(path, experiment(method=AROUND)).hello() == said
    assert 'method.name = "fedprox": allow_methods is "fedbaf", and fedbaf contains this method' in log_of(
        tmp_path / "a/silo.toml"
    )
    for name, words, code in (("c", [], "E_REFUSED"), ("d", ["mean"], None)):
        path = silo(tmp_path / name)
        path.write_text(path.read_text() + f"\n[allow_by_method]\nfedprox = {json.dumps(words)}")
        server = Server(path, experiment(method=AROUND))
        assert server.hello() == "fits"
        assert server.send("train.FedProx_train", {"w": W}).get("fault", {}).get("code") == code
        assert server.send("scores.Evaluation_evaluate", {"w": W, "part": "test"})["fault"]["code"] == "E_REFUSED"


def test_a_methods_words_take_the_place_of_the_silos(tmp_path):
    path = silo(tmp_path, allow=["mean"])
    path.write_text(path.read_text() + '\n[allow_by_method]\nfedamp = ["reply", "reveal"]\nfedprox = []')
    codes = {}
    for word, (method, handler, body) in EXPOSING.items():
        server = Server(path, experiment(method={"name": method, "rounds": 3}), key=method)
        assert server.hello() == "fits"
        codes[word] = server.send(handler, body).get("fault", {}).get("code")
    assert codes == {"mean": None, "reply": None, "scores": "E_REFUSED", "reveal": None}
    server = Server(path, experiment(method={"name": "fedprox", "rounds": 3}), key="fedprox")
    assert server.hello() == "fits"
    assert server.send("train.FedProx_train", {"w": head(2)})["fault"]["code"] == "E_REFUSED"


@pytest.mark.parametrize("kind", ["query", "scores", "reveal", "aggregate", "evaluate", ""])
def test_a_server_cannot_request_a_handler_under_the_name_of_another(tmp_path, kind):
    """What a handler exposes the silo looks up; the server's word counts for nothing."""
    server = Server(silo(tmp_path))  # which allows everything
    assert server.hello() == "fits"
    for handler, own in (("FedAvg_train", "train"), ("Evaluation_evaluate", "scores"), ("Evaluation_reveal", "reveal")):
        told = server.send(f"{kind}.{handler}", {"w": head(2), **({"part": "test"} if own == "scores" else {})})
        if kind == own:
            assert "fault" not in told
        else:
            assert told["fault"] == {"code": "E_REFUSED", "reason": f"{handler} answers {own}, not {kind}"}


def test_halves_that_the_method_does_not_declare_in_these_settings_are_not_answered(tmp_path):
    """Under [privacy] FedPFT releases noisy sums; what it sends without noise cannot be asked for beside them."""
    text = experiment(method={"name": "fedpft", "rounds": 1, "components": 1}, privacy=PRIVACY)
    server = Server(silo(tmp_path), text)
    assert server.hello() == "fits"
    for kind in ("train", "query"):
        for name in ("summarise", "sums", "pass_on"):
            assert server.send(f"{kind}.FedPFT_{name}", {})["fault"]["code"] == "E_REFUSED"
    assert "fault" not in server.send("query.FedPFT_release", {})


PRIVACY = {"unit": "record", "target_epsilon": 8.0, "delta": 1e-5}


# --- 4. everything else that a server decides ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key", ["..", ".", "../../etc", "a/b", "\0\n\x1b[2J", "x" * 5_000, "silo.log", "hello.json", "ä" * 300]
)
def test_a_runs_key_names_a_folder_below_the_silos_own(tmp_path, key):
    path = silo(tmp_path / "deep" / "silo")
    server = Server(path, key=key)
    assert server.hello() == "fits"
    assert {p.name for p in tmp_path.iterdir()} == {"deep"}
    assert {p.name for p in path.parent.iterdir()} == {"silo.toml", "silo.ledger.jsonl", "rows.npz", ".fedfm"}
    assert len(list((path.parent / ".fedfm" / "runs").iterdir())) == 1
    assert log_of(path).count("\n") == 1
    assert "\x1b" not in log_of(path)


@pytest.mark.parametrize("text", [None, 7, "", "[[[", "a = " + "[" * 50_000, "x = 1\n" * 400_000, "[data]\nname = 7"])
def test_an_experiment_that_is_none_is_refused(tmp_path, text):
    server = Server(silo(tmp_path), "")
    server.config["experiment"] = text
    if text is None:
        del server.config["experiment"]
    assert server.hello() == "E_EXPERIMENT"


def test_the_experiment_of_a_run_does_not_change(tmp_path):
    path = silo(tmp_path)
    assert Server(path).hello() == "fits"
    other = Server(path, experiment(method={"name": "fedprox"}))
    assert other.hello() == "E_EXPERIMENT"
    assert other.train()["fault"]["code"] == "E_EXPERIMENT"
    assert "body" in Server(path).train()


@pytest.mark.parametrize("place", [".fedfm", ".fedfm/runs", ".fedfm/runs/run", ".fedfm/runs/run/silo"])
def test_a_file_where_a_folder_is_wanted_is_a_fault(tmp_path, place):
    path = silo(tmp_path)
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text("")
    assert over_the_app(Server(path)) == ("E_EXCEPTION", client_stub.DISK)


def test_a_folder_where_a_file_is_wanted_is_a_fault(tmp_path):
    path = silo(tmp_path)
    (tmp_path / ".fedfm" / "runs" / "run" / "silo" / "site.json").mkdir(parents=True)
    assert over_the_app(Server(path)) == ("E_EXCEPTION", client_stub.DISK)


def over_the_app(server: Server, handler: str = HELLO) -> tuple[str, str]:
    """(code, end of the reason) of the reply that Flower's ClientApp gives, with a real worker."""
    head, pieces = payload.encode(codec.envelope(0, 0, {"classes": CLASSES}))
    with identity():
        message = Message(flower_records.pack(head, b"".join(pieces)), 1, handler)
        context = Context(1, 1, server.node, RecordDict(), server.config)
        reply = apps.client(message, context)
    loopback.end_workers(server.home / ".fedfm" / "runs")
    told = payload.decode(*flower_records.unpack(reply.content), None)
    assert str(server.home) not in json.dumps(told, default=str)
    fault = told.get("fault", {"code": "fits", "reason": ""})
    return fault["code"], fault["reason"].rpartition(": ")[2]


@pytest.mark.proof
def test_a_worker_imports_nothing_from_where_the_node_was_started(tmp_path, monkeypatch):
    path, here = silo(tmp_path), tmp_path / "here"
    here.mkdir()
    for module in ("numpy", "evil_module", "sitecustomize"):
        (here / f"{module}.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\n")
    monkeypatch.chdir(here)
    assert over_the_app(Server(path)) == ("fits", "")
    assert over_the_app(Server(path, experiment(method={"name": "evil_module:X"}), key="2"))[0] == "E_EXPERIMENT"
    assert not (tmp_path / "mark").exists()


def test_a_message_that_is_no_payload_is_a_fault(tmp_path):
    server = Server(silo(tmp_path))
    with identity():
        message = Message(RecordDict({"head": ConfigRecord({"json": "x"})}), 1, HELLO)
        reply = apps.client(message, Context(1, 1, server.node, RecordDict(), server.config))
    assert payload.decode(*flower_records.unpack(reply.content), None)["fault"]["code"] == "E_FORMAT"


@pytest.mark.parametrize(("round", "call"), [(-1, 0), (10**7, 0), (2**62, 0), (0, -1), (0, 10**5), (1.5, 0), ("1", 0)])
def test_rounds_that_no_memory_can_be_named_by_are_refused(tmp_path, round, call):
    server = Server(silo(tmp_path))
    assert server.hello() == "fits"
    assert server.send("train.FedAvg_train", {"w": head(2)}, round, call)["fault"]["code"] in ("E_FIELD", "E_DTYPE")


@pytest.mark.parametrize(
    "handler",
    [
        "train",
        "train.",
        "query.FedAvg_train.x",
        "train.FedAvg___init__",
        "train.os_system",
        "query." + "x" * 5_000,
        "\n\x1b",
    ],
)
def test_only_handlers_of_the_method_are_called(tmp_path, handler):
    server = Server(silo(tmp_path))
    assert server.hello() == "fits"
    assert server.send(handler, {"w": head(2)})["fault"]["code"] == "E_REFUSED"
    assert all(line[:2] == "20" for line in log_of(tmp_path / "silo.toml").splitlines())


MILLION = 1_000_000
BODIES = {  # heads with a million entries for %s, and the numbers that they speak of
    "entries": ('{"m":{%s}}', lambda i: f'"k{i}":"f"', MILLION),
    "metrics": ('{"m":{"w":{"m":{%s}}}}', lambda i: f'"k{i}":"f"', MILLION),
    "a list": ('{"m":{"classes":[%s]}}', lambda _: '{"s":"x"}', 0),
}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("handler", [HELLO, "train.FedAvg_train"])
def test_a_payload_of_many_parts_is_refused_before_it_is_built(tmp_path, handler, body):
    server = Server(silo(tmp_path))
    assert server.hello() == "fits"
    form, entry, numbers = BODIES[body]
    text = form % ",".join(map(entry, range(MILLION)))
    data = struct.pack("<qq", 1, 1) + bytes(8 * numbers)
    told = server.raw(handler, '{"m":{"round":"i","call":"i","body":' + text + "}}", data)
    assert told["fault"]["code"] in ("E_SIZE", "E_FORMAT")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"m":' * 50_000,
        '{"t":["float32",[1099511627776]]}',
        '{"m":{"round":"i","round":"i"}}',
        "\x00",
        "9" * 10_000,
    ],
)
def test_a_head_that_is_none_is_a_fault(tmp_path, text):
    server = Server(silo(tmp_path))
    assert server.hello() == "fits"
    for handler in (HELLO, "train.FedAvg_train"):
        told = server.raw(handler, '{"m":{"round":"i","call":"i","body":' + text + "}}", b"\1" + b"\0" * 15)
        assert told["fault"]["code"].startswith("E_")


@pytest.mark.proof
def test_the_size_of_a_silos_logs_is_bounded_whatever_the_server_sends(tmp_path, monkeypatch):
    monkeypatch.setattr("fedfm.core.storage.LONGEST", 2_000)
    path = silo(tmp_path)
    server = Server(path)
    server.hello()
    for _ in range(100):
        server.send("query.nothing" + "x" * 200, {})
        server.send("train.FedAvg_train", {"w": 7})
        server.send("train.FedAvg_train", {"w": Params({})})
    for log in (tmp_path / ".fedfm").rglob("*.log"):
        assert log.stat().st_size < 2_100
    assert "this log is full" in log_of(path)


# --- models ----------------------------------------------------------------------------------------------------------


def test_a_models_own_code_is_not_run(tmp_path):
    folder = tiny_vit(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.Config", "AutoModelForImageClassification": "own.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\n")
    load_model(ModelSpec(str(folder)), classes=("a", "b"), kind="image")
    config["model_type"] = "unknown-type"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError):
        load_model(ModelSpec(str(folder)), classes=("a", "b"), kind="image")
    assert not (tmp_path / "mark").exists()


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.bin"])
def test_pickled_weights_are_not_opened(tmp_path, name):
    import pickle

    folder = tiny_vit(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb(tmp_path / "mark")))
    with pytest.raises(InputError, match="safetensors"):
        load_model(ModelSpec(str(folder)), classes=("a", "b"), kind="image")
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("size", [2**63, 2**40, 2**31])
def test_weights_whose_header_claims_more_than_there_is_are_refused(tmp_path, size):
    folder = tiny_vit(tmp_path)
    header = {"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}
    text = json.dumps(header).encode()
    for claimed in (size, len(text)):
        (folder / "model.safetensors").write_bytes(min(claimed, 2**64 - 1).to_bytes(8, "little") + text + b"\0" * 64)
        with pytest.raises(InputError):
            load_model(ModelSpec(str(folder)), classes=("a", "b"), kind="image")
