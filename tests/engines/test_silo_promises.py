"""What only the server's word decides: a silo's promises hold whatever the experiment and the payloads say."""

import dataclasses

import pytest
import torch
from test_hostile_server import Server, W, experiment, log_of, silo

import every_method
from fedfm.config.experiment import Experiment
from fedfm.config.paths import KEYS
from fedfm.config.registry import available, resolve
from fedfm.core.client import Update
from fedfm.core.messages import Request
from fedfm.core.method import Method
from fedfm.errors import ClientFault, InputError
from fedfm.linalg.params import Params
from fedfm.methods.fedms.fedms import Activity, check_activity
from fedfm.models.layers import body_and_head
from fedfm.runtime.client import Silos
from fedfm.runtime.client_halves import handlers, kinds
from fedfm.runtime.population import populate

METHODS = sorted(available("methods"))
DP_SGD = {"mechanism": "dp_sgd", "unit": "record", "clip_norm": 1.0, "target_epsilon": 8.0, "delta": 1e-5}


def method(name, **keys):
    cls = resolve("methods", name)
    wanted = {f.name: "x" for f in dataclasses.fields(cls) if f.metadata.get("required")}
    return cls(**wanted | keys)


# --- halves -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{}, {"encryption": "clear"}, {"protocol": "permuted"}, {"predict": True}], ids=lambda s: str(*s)
)
def test_a_half_answers_what_its_method_lists_in_these_settings(settings):
    for name in METHODS:
        known = {f.name for f in dataclasses.fields(resolve("methods", name))}
        of = method(name, **{key: value for key, value in settings.items() if key in known})
        for half in handlers(of):
            owner = half.__self__
            listed = [kind for kind, at in (("train", owner.means), ("query", owner.asks)) if half.__name__ in at]
            assert list(kinds(half)) == listed, f"{name}: {half.__name__}"


def test_a_method_that_lists_nothing_is_called_by_both_verbs():
    class Undeclared(Method):
        rounds = 1
        init = step = params_for = lambda *_: None
        half = resolve("methods", "fedavg").train

    assert kinds(Undeclared().half) == ("train", "query")


def test_no_update_leaves_where_nothing_is_trained(tmp_path):
    server = Server(silo(tmp_path), experiment(method={"name": "zero_shot", "rounds": 0}))
    assert server.hello() == "fits"
    for kind in ("train", "query"):
        assert server.send(f"{kind}.ZeroShot_train", {"w": W}, 0)["fault"]["code"] == "E_REFUSED"


# --- names of tensors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedper", "fedrep"])
def test_a_head_stays_at_its_client_whatever_tensors_the_server_names(name, tmp_path):
    e = Experiment.from_dict(every_method.experiment_of(name, tmp_path))
    population = populate(e)
    silos = Silos(e.method, e.aggregation, population, memory=tmp_path / "memory")
    w, (body, head) = population.client_model.params(), body_and_head(population.client_model)

    def send(t, W_B, begin):
        request = Request(population.clients[0], f"train.{type(e.method).__name__}_train", {}, t, 1)
        return silos.answer([request._replace(payload={"W_B": W_B, "begin": begin})])[0]

    assert {*send(1, w.only(body), w.only(head)).delta} == {*body}
    wrong = [(w, Params({})), (w.only(body[1:]), Params({})), (w.only([*body, head[0]]), Params({}))]
    wrong += [(w.only(body), w), (w.only(body), Params({"x": torch.zeros(2)})), (w.only(head), w.only(body))]
    for W_B, begin in wrong:
        assert getattr(send(2, W_B, begin), "code", "") == "E_TENSORS"
    assert {*send(2, w.only(body), Params({})).delta} == {*body}


# --- models -----------------------------------------------------------------------------------------------------------


def test_every_setting_that_names_a_model_is_the_servers_or_of_the_silos_list():
    for name in METHODS:
        for f in dataclasses.fields(resolve("methods", name)):
            if f.name in KEYS["method"]:
                assert f.metadata.get("server_only") or f.metadata.get("client_model"), f"{name}: {f.name}"


@pytest.mark.parametrize("named", ["/etc", "org/model", "listed/model", "nano-vit"])
def test_a_model_that_a_method_names_is_one_that_the_silo_lists(tmp_path, named):
    path = silo(tmp_path, models=["listed/model"])
    ms = {"name": "fedms", "global_rounds": 1, "local_rounds": 1, "gate_backbone": named}
    server = Server(path, experiment(method={"name": "fedms"} | ms, model={"name": "nano-clip", "task": "zero_shot"}))
    server.config["experiment"] = server.config["experiment"].replace("rounds = 3\n", "", 1)
    server.hello()  # the rows are not pictures; what counts is whether the name is a reason
    text = f'method.gate_backbone = "{named}": this silo\'s file does not list this model'
    assert (text in log_of(path)) == (named not in ("listed/model", "nano-vit"))


# --- scores and own models --------------------------------------------------------------------------------------------


def test_errors_on_own_rows_are_scores(tmp_path):
    text = experiment(method={"name": "fedpft", "rounds": 1, "components": 1, "verify": True})
    for words, said in ((["mean", "reply"], "E_EXPERIMENT"), (["reply", "scores"], "fits")):
        path = silo(tmp_path / said, allow=words)
        assert Server(path, text).hello() == said
    assert 'method.verify: it discloses the silo\'s accuracy, and "scores" is not in allow' in log_of(
        tmp_path / "E_EXPERIMENT" / "silo.toml"
    )


@pytest.mark.parametrize("tables", [{"aggregation": {"name": "secure"}}, {"privacy": {"aggregator": "secagg"}}, {}])
def test_under_hidden_sums_no_own_model_reveals_an_update(tmp_path, tables):
    """FedALA's own model is the one that it received, plus its update."""
    path = silo(tmp_path)
    if tables:
        path.write_text(path.read_text() + '\n[require]\naggregator = "secagg"\n')
    server = Server(path, experiment(method={"name": "fedala", "rounds": 3}, **tables))
    assert server.hello() == "fits"
    told = server.send("reveal.Evaluation_reveal", {"w": W}, 1, 2)
    assert ("body" in told) == (not tables)


# --- noise ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outer", ["fedbaf", "weight_init"])
def test_a_number_of_tokens_is_no_weight_under_dp_sgd_in_a_method_inside_either(outer):
    def tables(weighting):
        inside = {"name": outer, "foundation": "x", "base": {"name": "fedavg", "weighting": weighting}}
        return {"data": {"path": "x"}, "model": {"name": "nano-gpt2"}, "method": inside, "privacy": DP_SGD}

    Experiment.from_dict(tables("size"))
    with pytest.raises(InputError, match=r"method\.base\.weighting"):
        Experiment.from_dict(tables("tokens"))


# --- the mirror: what the server takes a client's word for ------------------------------------------------------------


@pytest.mark.parametrize(("name", "most"), [("passes_beside", 100.0), ("accuracy_before_aggregation", 1.0)])
def test_a_result_states_no_passes_and_no_accuracy_that_no_rows_have(name, most):
    for value in (0.0, most / 2, most):
        assert Update(Params({}), 1.0, {name: value}).metrics == {name: value}
    for value in (-1.0, -1e300, 1e6, 1e300, float("nan")):
        with pytest.raises(ClientFault, match="E_FIELD"):
            Update(Params({}), 1.0, {name: value})


def test_a_client_reports_no_activity_that_its_model_cannot_have():
    for k, rows, seconds in ((1, 0, 0.0), (12, 500, 3.5)):
        check_activity(Activity(k, rows, seconds), 12)
    for k, rows, seconds in ((0, 1, 0.0), (-5, 1, 0.0), (13, 1, 0.0), (10**9, 1, 0.0), (1, -1, 0.0), (1, 1, -1.0)):
        with pytest.raises(ClientFault, match="E_FIELD"):
            check_activity(Activity(k, rows, seconds), 12)
