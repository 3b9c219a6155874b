"""`fedfm advise`: every option is an experiment, and its run has the price that the advice states."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import ciphertext_student
import fedfm
from fedfm.api import rehearsal
from fedfm.api.advise import advise
from fedfm.api.rehearsal import rehearse, shorten, thin
from fedfm.cli import main
from fedfm.config.experiment import Experiment
from fedfm.core.toml_text import to_toml
from fedfm.data.table import ClientRows, FederatedData
from fedfm.errors import InputError, RunError
from fedfm.runtime.population import populate
from fedfm.runtime.run_directory import Run
from small import experiment, pictures

QUIET = fedfm.Progress()
ALWAYS = {"clear", "secure_sums", "client_noise", "secure_client_noise", "record_noise"}
ONE_ROUND = {"one_round_sums", "one_round_noise"}


def file(folder, **changes):
    """An experiment's file, with its rows next to it."""
    tables = experiment(folder, **{"method": {"fraction": 1.0, "rounds": 5}, **changes})
    tables["data"]["path"] = "rows.npz"
    path = folder / "exp.toml"
    path.write_text(to_toml(tables))
    return path


@pytest.fixture(scope="module")
def advice(tmp_path_factory):
    folder = tmp_path_factory.mktemp("advice")
    path = file(folder)
    return path, advise(path, folder / "options", seconds=2.0, progress=QUIET)


@pytest.mark.proof
def test_every_option_passes_check_and_costs_what_the_advice_states(advice, tmp_path, capsys):
    _, found = advice
    assert {o["name"] for o in found["options"]} == ALWAYS | ONE_ROUND
    for option in found["options"]:
        assert main(["check", option["file"], "--format", "json"]) == 0
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["valid"]
        result = fedfm.run(option["file"], tmp_path / option["name"], progress=QUIET)
        run = Run.open(tmp_path / option["name"])
        sent = result["bytes_up"] + result["bytes_down"]
        assert abs(option["bytes"] - sent) <= 0.2 * sent, option["name"]
        assert option["epsilon"] == run.manifest["ledger"]["epsilon"] == result["epsilon"]
        assert option["rounds"] == result["rounds"]
        assert (option["unit"] is None) == (option["epsilon"] is None)
        assert option["seconds"] > 0
        assert set(option["readable"]) == {"server", "clients", "holders of the model"}


@pytest.mark.proof
def test_the_keys_of_an_option_make_its_experiment(advice):
    path, found = advice
    for option in found["options"]:
        same = Experiment.load(path, option["set"], tell=lambda text: None).to_dict()
        for key, value in Experiment.load(option["file"]).to_dict().items():
            if key == "data":
                assert value | {"path": ""} == same[key] | {"path": ""}
            elif key != "name":
                assert value == same[key]


@pytest.mark.proof
def test_readers_of_an_option_follow_from_its_messages(advice):
    server = {o["name"]: o["readable"]["server"] for o in advice[1]["options"]}
    assert server["clear"].startswith("each client's update (train)")
    assert "scores" in server["clear"]
    assert server["secure_sums"] == "sums over at least 5 clients (train)"
    assert server["client_noise"] == "each client's update (train)"  # the server adds the noise itself
    assert server["record_noise"] == "each client's update with noise (train)"
    assert server["secure_client_noise"] == "sums with noise over at least 5 clients (train)"
    assert server["one_round_sums"] == "sums over at least 5 clients (sums)"
    assert server["one_round_noise"] == "each client's reply with noise (release)"


@pytest.mark.proof
def test_impossible_options_are_listed_with_the_reason(advice, tmp_path):
    (refused,) = advice[1]["refused"]
    assert refused["name"] == "encrypted_rows"
    assert refused["reason"].startswith('model.name = "features"')
    path = file(tmp_path, method={"name": "fedbip", "rounds": 2, "fraction": 1.0, "local": {"learning_rate": 0.1}})
    reasons = {r["name"]: r["reason"] for r in advise(path, seconds=1.0, progress=QUIET)["refused"]}
    assert {"secure_sums", "client_noise", "secure_client_noise"} <= set(reasons)
    assert "single replies" in reasons["secure_sums"]


@pytest.mark.proof
def test_encrypted_rows_cost_what_the_plan_says(tmp_path):
    """A run on ciphertexts with a tiny model: its bytes against the advice."""
    pytest.importorskip("tenseal.sealapi", reason='TenSEAL is absent: pip install "fedfm[encrypted]"')
    tables = {
        "data": {"path": str(pictures(tmp_path, 40)), "partition": {"name": "iid", "clients": 3}},
        "model": {"name": str(ciphertext_student.folder(tmp_path)), "adaptation": {"name": "head"}},
        "method": {"name": "fedavg", "rounds": 4},
        "run": {"workers": 1},
    }
    found = advise(tables, tmp_path / "options", seconds=1.0, progress=QUIET)
    (option,) = [o for o in found["options"] if o["name"] == "encrypted_rows"]
    result = fedfm.run(option["file"], tmp_path / "run", progress=QUIET)
    sent = result["bytes_up"] + result["bytes_down"]
    assert abs(option["bytes"] - sent) <= 0.2 * sent
    assert option["readable"]["server"].startswith("ciphertexts")
    assert option["epsilon"] is None
    assert option["plan"]["security_bits"] >= 128
    assert option["set"] is None  # a file has no [model] table then
    assert "model" not in Experiment.load(option["file"]).to_dict()


@pytest.mark.parametrize("rounds", [1, 2, 3, 8])
def test_a_rehearsal_counts_the_bytes_of_the_complete_run(tmp_path, rounds):
    made = Experiment.from_dict(experiment(tmp_path, method={"name": "scaffold", "rounds": rounds, "fraction": 1.0}))
    found = rehearse(made, populate(made), 2.0)
    result = fedfm.run(made, tmp_path / "run", progress=QUIET)
    assert (found.bytes_up, found.bytes_down) == (result["bytes_up"], result["bytes_down"])
    assert found.rounds == min(rounds, 3)
    assert found.rows == found.all_rows
    assert not found.at_least


def test_a_rehearsal_on_few_rows_says_so(tmp_path):
    made = Experiment.from_dict(experiment(tmp_path, method={"rounds": 9, "fraction": 1.0}))
    population = populate(made)
    before = population.model.params()
    found = rehearse(made, population, 1e-6)
    assert found.rows < found.all_rows
    assert found.basis.startswith(f"measured in 3 of 9 rounds on {found.rows} of {found.all_rows} training rows")
    after = population.model.params()
    assert all(before[name].equal(after[name]) for name in before)


def test_a_rehearsal_runs_here_without_observers(tmp_path):
    tables = experiment(tmp_path, run={"engine": "simulation", "track": ["tensorboard"], "gpus_per_client": 0.5})
    short = shorten(Experiment.from_dict(tables))
    assert (short.run.engine, short.run.track, short.run.gpus_per_client) == ("local", (), None)
    assert (short.run.seed, short.method.rounds) == (1, 3)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_thinned_rows_keep_clients_and_classes(labels, most, clients, named):
    class Labelled:
        pass

    table = Labelled()
    table.labels = np.array(labels) if named else None
    owner = np.arange(len(labels)) % clients
    none = np.zeros(0, np.int64)
    federated = FederatedData(
        table, {f"c{k}": ClientRows(np.flatnonzero(owner == k), none, none) for k in range(clients)}, none
    )
    found = thin(federated, most)
    assert list(found.clients) == list(federated.clients)
    for name, rows in federated.clients.items():
        kept = found.clients[name].train
        assert set(kept) <= set(rows.train)
        assert list(kept) == sorted(kept)
        if named:
            of, all_of = table.labels[kept], table.labels[rows.train]
            assert [(of == c).sum() for c in range(4)] == [min((all_of == c).sum(), most) for c in range(4)]
        else:
            assert len(kept) == min(len(rows.train), most)
    assert thin(federated, None) is federated


def test_rows_that_are_too_few_are_not_a_reason_against_an_option(tmp_path, monkeypatch):
    made = Experiment.from_dict(experiment(tmp_path, method={"rounds": 4, "fraction": 1.0}))
    population, asked = populate(made), []

    def start(run, stop, progress, given):
        asked.append(int(given().federated.sizes("train").sum()))
        if len(asked) == 1:
            raise RunError("the noise left no class")
        return engine(run, stop, progress, given)

    engine = rehearsal.start
    monkeypatch.setattr(rehearsal, "start", start)
    found = rehearse(made, population, 2.0)
    assert asked[0] < asked[1] == found.all_rows == found.rows


@pytest.mark.proof
def test_the_command_is_readable_at_80_columns(tmp_path, capsys):
    path = file(tmp_path, method={"rounds": 2, "fraction": 1.0}, data={"partition": {"name": "iid", "clients": 2}})
    assert main(["advise", str(path), "--seconds", "0.5"]) == 0
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines() if str(tmp_path) not in line) <= 80
    assert "not possible: privacy.aggregator" in " ".join(out.split())  # secure aggregation needs three clients
    assert out.splitlines()[0].split() == ["option", "seconds", "bytes", "epsilon", "unit", "the", "server", "reads"]


@pytest.mark.proof
def test_the_experiment_s_own_privacy_is_the_target(tmp_path):
    privacy = {"unit": "client", "target_epsilon": 3.0, "delta": 1e-4, "clip_norm": 0.5}
    path = file(tmp_path, method={"rounds": 1, "fraction": 1.0}, privacy=privacy)
    found = advise(path, tmp_path / "options", seconds=0.1, progress=QUIET)
    assert (found["epsilon"], found["delta"]) == (3.0, 1e-4)
    options = {o["name"]: o for o in found["options"]}
    assert options["clear"]["epsilon"] is None
    assert options["clear"]["set"] is None  # no --set drops a table
    assert Experiment.load(options["clear"]["file"]).privacy is None
    assert options["client_noise"]["epsilon"] == pytest.approx(3.0, abs=1e-6)
    assert Experiment.load(options["record_noise"]["file"]).privacy.clip_norm == 0.5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method.name": "centralised"}, "pools all rows"),
        ({"run.engine": "deployment", "run.superlink": "127.0.0.1:1"}, "run.superlink: the silos have the rows"),
        ({"method.rounds": -1}, "method.rounds"),
    ],
)
def test_experiments_that_cannot_be_rehearsed_are_refused(tmp_path, changes, words):
    with pytest.raises(InputError, match=words):
        advise(file(tmp_path), changes=changes, progress=QUIET)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ({"epsilon": 0.0}, r"--epsilon 0: expected a number above 0"),
        ({"epsilon": math.nan}, r"--epsilon nan"),
        ({"delta": 0.0}, r"--delta 0: expected a number in \(0, 1\)"),
        ({"delta": 1.0}, r"--delta 1"),
        ({"clip_norm": 0.0}, r"--clip-norm 0"),
    ],
)
def test_a_target_that_no_noise_has_is_refused_and_not_replaced(tmp_path, target, words):
    with pytest.raises(InputError, match=words):
        advise(file(tmp_path), progress=QUIET, **target)


def test_the_bytes_of_cohorts_by_coins_are_those_of_the_mean_cohort(tmp_path):
    """Whatever the coins of a rehearsal are: two of them agree, and no run has to."""
    privacy = {"unit": "client", "noise_multiplier": 1.0, "delta": 1e-3, "clip_norm": 1.0}
    made = Experiment.from_dict(experiment(tmp_path, method={"rounds": 3, "fraction": 0.5}, privacy=privacy))
    found = [rehearse(made, populate(made), 0.1) for _ in range(3)]
    assert len({(of.bytes_up, of.bytes_down) for of in found}) == 1


def test_rows_that_do_not_fit_are_the_experiment_s_fault(tmp_path):
    path = file(tmp_path, data={"partition": {"name": "iid", "clients": 10_000}})
    with pytest.raises(InputError, match=r"data.partition.clients = 10000"):
        advise(path, progress=QUIET)


@pytest.mark.proof
def test_cohorts_by_coins_count_with_their_mean(tmp_path):
    privacy = {"unit": "client", "noise_multiplier": 1.0, "delta": 1e-3, "clip_norm": 1.0}
    tables = experiment(tmp_path, method={"rounds": 40, "fraction": 0.5}, privacy=privacy)
    tables["data"]["partition"] = {"name": "iid", "clients": 20}
    made = Experiment.from_dict(tables)
    found = rehearse(made, populate(made), 2.0)
    result = fedfm.run(made, tmp_path / "run", progress=QUIET)
    sent = result["bytes_up"] + result["bytes_down"]
    # 800 coins of the run have a deviation of 3.5 % of their mean.
    assert abs(found.bytes_up + found.bytes_down - sent) < 0.2 * sent


def test_a_method_whose_clients_lack_the_model_is_refused(tmp_path):
    tables = {
        "data": {"name": "digits"},
        "method": {"name": "blindfed", "foundation": "nano-vit-fhe", "encryption": "clear"},
    }
    with pytest.raises(InputError, match="whose clients have the model"):
        advise(tables, progress=QUIET)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    with pytest.raises(InputError, match="not empty"):
        advise(file(tmp_path), tmp_path / "full", progress=QUIET)


def test_measured_accuracies_are_those_of_the_results_page():
    from importlib.resources import files
    from pathlib import Path

    records = json.loads(files("fedfm.api").joinpath("measured_accuracy.json").read_text())
    kept = json.loads((Path(__file__).parents[2] / "docs/results/privacy.json").read_text())
    names = {("features", 192): "cifar10", ("features", 384): "banking77", ("image", None): "lora"}
    assert {r["protection"] for r in records} >= {"clear", "record_noise", "client_noise", "one_round_noise"}
    for record in records:
        table = names[record["kind"], record["width"]] + ("_open" if record["epsilon"] is None else "")
        seeds = [seed["accuracy"] for seed in kept[table]["rows"][record["row"]].values()]
        assert record["accuracy"] == pytest.approx(np.mean(seeds), abs=0.051)
        assert record["seeds"] == len(seeds)
        if len(seeds) > 1:
            half = stats.t.ppf(0.975, len(seeds) - 1) * np.std(seeds, ddof=1) / math.sqrt(len(seeds))
            assert record["half"] == pytest.approx(half, abs=0.051)
        else:
            assert record["half"] is None
