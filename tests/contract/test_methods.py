"""The contract that every registered method has to fulfil."""

import dataclasses
import inspect
import json
import sys

import pytest

import fedfm
from every_method import LEARNS, METHODS, SAMPLE, TRAINED, experiment_of
from fedfm.aggregation.base import secrets_of
from fedfm.config.experiment import Experiment
from fedfm.config.registry import resolve
from fedfm.core.method import Method, fraction_of
from fedfm.errors import InputError
from fedfm.privacy.composition import Releases, epsilon_of
from stopping import run_stopped, stop_in_steps


@pytest.fixture(autouse=True)
def _secrets(monkeypatch):
    """What is drawn in secret differs from run to run, unless it is given."""
    monkeypatch.setattr("fedfm.runtime.client_memory.entropy", lambda n: b"k" * n)


@pytest.mark.parametrize("name", METHODS)
class TestEveryMethod:
    def test_is_a_frozen_dataclass_with_documented_keys(self, name):
        cls = resolve("methods", name)
        assert issubclass(cls, Method)
        with pytest.raises(dataclasses.FrozenInstanceError):
            cls().rounds = 3
        assert [f.name for f in dataclasses.fields(cls) if not f.metadata.get("help")] == []

    def test_cites_its_paper(self, name):
        doc = sys.modules[resolve("methods", name).__module__].__doc__
        assert "Algorithm" in doc
        assert "arXiv:" in doc

    def test_a_method_imports_no_engine_data_or_flower(self, name):
        source = inspect.getsource(sys.modules[resolve("methods", name).__module__])
        for word in ("flwr", "fedfm.engines", "fedfm.runtime", "fedfm.data"):
            assert f"import {word}" not in source
            assert f"from {word}" not in source

    def test_an_experiment_of_a_method_survives_toml(self, name, tmp_path):
        import tomllib

        e = Experiment.from_dict(experiment_of(name, tmp_path))
        assert Experiment.from_dict(tomllib.loads(e.to_toml())).to_dict() == e.to_dict()


def crossed(folder):
    """(client halves whose replies came as a mean, those whose replies the server saw), by a run's messages."""
    lines = [json.loads(line) for line in (folder / "messages.jsonl").read_text().splitlines()]
    # Besides the method's own messages the run asks for evaluation, which is of kinds of its own and not counted.
    assert not any(line["counted"] for line in lines if line["handler"].split(".")[0] in ("scores", "reveal"))
    named = [name for line in lines if (name := line["handler"].split(".", 1))[0] not in ("scores", "reveal")]
    assert {kind for kind, _ in named} <= {"train", "query"}
    return tuple({name.split("_", 1)[1] for kind, name in named if kind == verb} for verb in ("train", "query"))


RECORD = {"unit": "record", "target_epsilon": 100.0, "delta": 1e-5}
SETTINGS = [
    *((name, {}, {}) for name in METHODS),
    *((name, {"base": {"name": base}}, {}) for name in ("fedbaf", "weight_init") for base in ("scaffold", "fedadam")),
    ("ccvr", {"rounds": 1}, {}),
    ("fedpft", {"verify": True}, {}),
    ("fedpft", {"topology": "chain", "verify": True}, {}),
    ("fedpft", {"pooled": True}, {}),  # says nothing without [privacy]
    ("fedpft", {"components": 1}, {"privacy": RECORD}),
    ("fedpft", {"components": 1, "pooled": True}, {"privacy": RECORD}),
]


CLIENT = {"unit": "client", "noise_multiplier": 0.5, "clip_norm": 10.0, "delta": 1e-5}
# fmt: off
NOISY = {
    "average", "ccvr", "dsfl", "fedadam", "fedavg", "fedavgm", "fedbaf", "fedclip", "fedncm", "fedprox", "fedyogi",
    "ghofl", "ldawa", "scaffold", "weight_init",
}
# fmt: on


@pytest.mark.sample(
    "fedpft", "fedbaf", "fedbip", "fedms", "blindfed", "analytic", "average", "fedavg", "fedavgm", "fedncm", "scaffold"
)
@pytest.mark.usefixtures("coarse_accounting")
@pytest.mark.parametrize("name", METHODS)
def test_under_client_level_privacy_it_releases_noisy_means_or_is_refused(name, tmp_path):
    tables = experiment_of(name, tmp_path, rounds=2) | {"privacy": CLIENT}
    if name not in NOISY:
        with pytest.raises(InputError, match="privacy"):
            Experiment.from_dict(tables)
        return
    result, method = fedfm.run(tables, tmp_path / "run"), Experiment.from_dict(tables).method
    rate = fraction_of(method) if len(method.means) == 1 else 1.0
    assert result["epsilon"] == epsilon_of([Releases(0.5, method.rounds * len(method.means), rate)], 1e-5)
    assert "noise.secret" in {path.name for path in (tmp_path / "run/private/server").iterdir()}


BY_ROW = {"unit": "record", "mechanism": "dp_sgd", "target_epsilon": 8.0, "clip_norm": 1.0, "delta": 1e-5}
# fmt: off
BY_OPTIMISER = {
    "fedadam", "fedavg", "fedavgm", "fedawa", "fedbaf", "fedbip", "fedex_lora", "fedprox", "fedyogi", "flexlora",
    "flora", "ldawa", "local", "raflora", "scaffold", "weight_init",
}
# fmt: on


@pytest.mark.sample(*SAMPLE)
@pytest.mark.usefixtures("coarse_accounting")
@pytest.mark.parametrize("name", METHODS)
def test_by_dp_sgd_it_spends_its_target_or_is_refused(name, tmp_path):
    tables = experiment_of(name, tmp_path, rounds=2) | {"privacy": BY_ROW}
    if name not in BY_OPTIMISER:
        with pytest.raises(InputError, match="privacy"):
            Experiment.from_dict(tables)
        return
    result = fedfm.run(tables, tmp_path / "run")
    assert 0 < result["epsilon"] <= 8.0
    assert not result["excluded"]


@pytest.mark.sample("fedpft", "fedbaf", "fedbip", "fedms", "blindfed", "fedavg", "scaffold")
@pytest.mark.parametrize(("name", "keys", "more"), SETTINGS)
def test_a_method_calls_exactly_the_client_halves_that_it_declares(name, keys, more, tmp_path):
    tables = experiment_of(name, tmp_path, **({"rounds": 2} | keys)) | more
    fedfm.run(tables, tmp_path / "run")
    method = Experiment.from_dict(tables).method
    assert (set(method.means), set(method.asks)) == crossed(tmp_path / "run")
    # The server's secrets, too: one that is not declared would be drawn again by a run that has lost it.
    assert set(secrets_of(method, Experiment.from_dict(tables).aggregation)) == {
        path.stem for path in (tmp_path / "run/private/server").glob("*.secret")
    }


@pytest.mark.sample(*SAMPLE)
@pytest.mark.parametrize("name", TRAINED)
class TestEveryTrainedMethod:
    @pytest.mark.sample("fedavg", "fedbaf", "fedbip", "fedpft", "blindfed", "scaffold")
    def test_same_seed_same_bits_whatever_runs_it(self, name, tmp_path, monkeypatch):
        def replace(pool, slot, selector):
            raise AssertionError("a worker has ended, though nobody killed it")

        monkeypatch.setattr("fedfm.engines.local.worker_pool.Pool._replace", replace)
        results = []
        for i, run in enumerate(({"workers": 1}, {"workers": 2}, {"workers": 1, "wire": True})):
            tables = experiment_of(name, tmp_path, rounds=2, run=run)
            results.append(fedfm.run(tables, tmp_path / str(i)))
        assert len({r["params_sha256"] for r in results}) == 1
        assert len({(r["bytes_up"], r["bytes_down"], r["accuracy"]) for r in results}) == 1
        if name in {"analytic", "ghofl"}:  # sums of all rows make the head: the partition and the seed do not show
            return
        other = fedfm.run(experiment_of(name, tmp_path, rounds=2, run={"seed": 2}), tmp_path / "other")
        assert other["params_sha256"] != results[0]["params_sha256"]

    @pytest.mark.sample("blindfed", "ditto", "fedavg", "fedbaf", "fedms", "kd", "scaffold")
    def test_clients_follow_schedule_warm_up_and_norm_or_refuse_them(self, name, tmp_path):
        """Of steps that last until the end; a method that calibrates its head after them shows none of it."""
        if name == "ccvr" or "local" not in {f.name for f in dataclasses.fields(resolve("methods", name))}:
            return
        tables, ends = experiment_of(name, tmp_path, rounds=2), []
        tables["method"] |= {"global_rounds": 0} if name == "fedms" else {}
        tables["method"].setdefault("local", {"learning_rate": 0.05, "batch_size": 8})
        changes = [{}, {"schedule": "linear"}, {"warmup": 0.5}, {"max_grad_norm": 1e-3}]
        for i, change in enumerate(changes):
            told = {**tables, "method": {**tables["method"], "local": {**tables["method"]["local"], **change}}}
            ends.append(fedfm.run(told, tmp_path / str(i))["params_sha256"])
        assert len(set(ends)) == len(changes)

    @pytest.mark.sample("blindfed", "fedbaf", "fedbip", "fedms", "fedpft", "flora", "scaffold")
    def test_learns(self, name, tmp_path):
        run = {"evaluate_every": 0}  # at the end alone
        tables = experiment_of(name, tmp_path, rounds=10, run=run, fraction=1.0, **LEARNS.get(name, {}))
        result = fedfm.run(tables, tmp_path / "run")
        start = fedfm.run(experiment_of("zero_shot", tmp_path, like=name), tmp_path / "start")
        assert result["accuracy"] > start["accuracy"] + 0.15

    @pytest.mark.sample("fedavg", "fedbaf", "fedbip", "fedpft", "ditto", "scaffold")
    def test_a_resumed_run_equals_a_straight_one(self, name, tmp_path, monkeypatch):
        tables = experiment_of(name, tmp_path, rounds=4)
        straight = fedfm.run(tables, tmp_path / "straight")
        rounds = [t for t in (1, 3, 4) if t <= straight["rounds"]]
        crash = stop_in_steps(monkeypatch, resolve("methods", name), rounds)
        run_stopped(tables, tmp_path / "broken")
        for _ in crash[:]:
            with pytest.raises(KeyboardInterrupt):
                fedfm.resume(tmp_path / "broken")
        resumed = fedfm.resume(tmp_path / "broken")
        assert crash == []
        for key in ("params_sha256", "accuracy", "client_accuracy", "bytes_up", "bytes_down", "rounds"):
            assert resumed[key] == straight[key], key
        lines = [
            [{k: v for k, v in m.items() if not k.endswith("seconds")} for m in fedfm.load_run(tmp_path / r).metrics()]
            for r in ("straight", "broken")
        ]
        assert lines[0] == lines[1]
        logs = [(tmp_path / r / "messages.jsonl").read_text() for r in ("straight", "broken")]
        assert [x for x in logs[0].split("\n") if '"counted": true' in x] == [
            x for x in logs[1].split("\n") if '"counted": true' in x
        ]
