"""Attacks by clients: which clients attack, what they change, and which data stay clean."""

import dataclasses
import io
import tomllib

import numpy as np
import pytest
import torch
from PIL import Image

import fedfm
from every_method import experiment_of
from fedfm.attacks.attack import Attack, locals_of
from fedfm.attacks.attackers import Attackers, with_locals
from fedfm.attacks.backdoor import Backdoor
from fedfm.attacks.label_shuffle import LabelShuffle
from fedfm.attacks.scaled_update import ScaledUpdate
from fedfm.attacks.sign_flip import SignFlip
from fedfm.audits.replay import open_finished, replay
from fedfm.config.experiment import Experiment
from fedfm.config.registry import available
from fedfm.core.messages import Request
from fedfm.data.table import Table
from fedfm.errors import InputError
from fedfm.methods.fedavg import FedAvg
from fedfm.methods.fedprox import FedProx
from fedfm.methods.scaffold import Scaffold
from fedfm.runtime.client import Silos
from fedfm.runtime.evaluation import Evaluation
from fedfm.runtime.population import populate
from fedfm.training import SGD
from fedfm.training.personal import DualAdapter
from small import experiment
from stopping import run_stopped, stop_in_steps
from toy import federation
from toy import run as rounds

ATTACKS = {
    "label_shuffle": {"intensity": 2},
    "sign_flip": {},
    "reversed_weights": {"variant": "reflect"},
    "scaled_update": {"factor": 3.0},
    "backdoor": {"target": "cow", "factor": 2.0},
}
NAMES = [f"client-0{i}" for i in range(5)]


def tables(folder, attack="label_shuffle", fraction=0.4, method="fedavg", run=None, model=None, **keys):
    method = (
        {"name": method}
        if method in ("fedpft", "fedncm", "average", "zero_shot")
        else {"name": method, "fraction": 1.0}
    )
    found = experiment(folder, run=run or {}, **({"model": model} if model else {}))
    return (
        found
        | {"method": {**found["method"], **method} if "fraction" in method else method}
        | {"attack": {"name": attack, "fraction": fraction, **keys}}
    )


def rows_of(kind, inputs, labels=None, classes=("a", "b", "c")):
    n = len(inputs)
    return Table(kind, inputs, None if labels is None else np.asarray(labels), classes, np.full(n, "train"))


def attackers(attack, rows="abcd", seed=0, task="classification"):
    return Attackers(attack, sorted(rows), seed, task)


class TestWho:
    @pytest.mark.parametrize(("clients", "fraction", "count"), [(10, 0.3, 3), (10, 0.1, 1), (7, 0.5, 3), (3, 1.0, 3)])
    def test_exactly_the_floor(self, clients, fraction, count):
        names = [f"c{i}" for i in range(clients)]
        found = Attackers(SignFlip(fraction), names, 0, "classification").names
        assert len(found) == count
        assert found == tuple(sorted(set(found) & set(names)))

    def test_by_seed_and_whatever_the_order_of_names(self):
        names = [f"c{i}" for i in range(20)]
        by_seed = [Attackers(SignFlip(0.25), names, seed, "").names for seed in range(5)]
        assert len(set(by_seed)) > 1
        assert Attackers(SignFlip(0.25), names[::-1], 3, "").names == by_seed[3]
        assert Attackers(LabelShuffle(0.25), names, 3, "").names == by_seed[3]  # whatever the attack

    def test_a_fraction_that_gives_no_attacker_is_refused(self, tmp_path):
        with pytest.raises(
            InputError, match=r"attack.fraction = 0.1: for 5 clients this gives no attacker; expected at least 0.2"
        ):
            fedfm.run(tables(tmp_path, fraction=0.1), tmp_path / "run")
        assert not (tmp_path / "run").exists()

    def test_an_attack_is_stated_in_manifest_result_and_report(self, tmp_path):
        result = fedfm.run(tables(tmp_path), tmp_path / "run")
        manifest = fedfm.load_run(tmp_path / "run").manifest
        assert len(result["attackers"]) == 2
        assert set(result["attackers"]) < set(NAMES)
        assert manifest["attackers"] == result["attackers"]
        page = (tmp_path / "run" / "report.html").read_text()
        assert f"under attack (label_shuffle) by {', '.join(result['attackers'])}" in page
        honest = fedfm.run(experiment(tmp_path), tmp_path / "honest")
        assert honest["attackers"] == []
        assert "under attack" not in (tmp_path / "honest" / "report.html").read_text()


class TestLabelShuffle:
    def test_labels_are_permuted_and_rows_stay(self):
        rows = rows_of("features", np.arange(60.0).reshape(30, 2), np.arange(30) % 3)
        poisoned = LabelShuffle(1.0).poison(rows, np.random.default_rng(0), "classification")
        assert sorted(poisoned.labels) == sorted(rows.labels)
        assert (poisoned.labels != rows.labels).any()
        assert poisoned.inputs is rows.inputs

    def test_words_of_a_language_model(self):
        rows = rows_of("passages", ["one two three four five\n", "six seven"])
        poisoned = LabelShuffle(1.0).poison(rows, np.random.default_rng(0), "language_modelling").inputs
        assert [sorted(x.split()) for x in poisoned] == [sorted(x.split()) for x in rows.inputs]
        assert poisoned[0] != rows.inputs[0].strip()

    def test_answers_of_instructions(self):
        pairs = [(f"q{i}", f"a{i}") for i in range(9)]
        poisoned = (
            LabelShuffle(1.0).poison(rows_of("instruction", pairs), np.random.default_rng(0), "instruction").inputs
        )
        assert [q for q, _ in poisoned] == [q for q, _ in pairs]
        assert sorted(a for _, a in poisoned) == sorted(a for _, a in pairs)
        assert poisoned != pairs

    def test_answers_of_preferences(self):
        triples = [(f"q{i}", f"good{i}", f"bad{i}") for i in range(12)]
        poisoned = LabelShuffle(1.0).poison(rows_of("preference", triples), np.random.default_rng(0), "preference")
        swapped = [(q, b, a) for q, a, b in triples]
        assert all(new in (old, other) for new, old, other in zip(poisoned.inputs, triples, swapped, strict=True))
        assert 0 < sum(new != old for new, old in zip(poisoned.inputs, triples, strict=True)) < 12

    def test_in_a_run_only_attackers_training_rows_change_once_and_for_all(self, tmp_path):
        with_val = tables(tmp_path)
        with_val["data"] = {**with_val["data"], "val_fraction": 0.2}
        attacked, again = (populate(Experiment.from_dict(with_val)) for _ in range(2))
        clean = populate(Experiment.from_dict({k: v for k, v in with_val.items() if k != "attack"}))
        orders = []
        for client in NAMES:
            a, b, c = (p.data(client) for p in (attacked, again, clean))
            assert torch.equal(a.train.labels, b.train.labels)
            assert torch.equal(a.train.tensors["features"], c.train.tensors["features"])
            assert torch.equal(a.test.labels, c.test.labels)
            assert torch.equal(a.val.labels, c.val.labels)
            assert torch.equal(a.train.labels, c.train.labels) == (client not in attacked.attackers.names)
            orders.append(a.train.labels.tolist())
        assert torch.equal(attacked.test.labels, clean.test.labels)

    def test_intensity_multiplies_epochs_and_divides_them_for_language_models(self):
        local = SGD(epochs=4)
        assert LabelShuffle(0.5, intensity=5).local(local, "classification").epochs == 20
        assert LabelShuffle(0.5, intensity=2).local(local, "language_modelling").epochs == 2
        assert LabelShuffle(0.5, intensity=9).local(local, "instruction").epochs == 1
        assert LabelShuffle(0.5, intensity=2).local(local, "preference").epochs == 2
        assert LabelShuffle(0.5).local(local, "classification") is local

    @pytest.mark.parametrize("workers", [1, 2])
    def test_intensity_by_hand(self, tmp_path, workers):
        """E full-batch steps at rate eta bring w to a + (1 - eta)^E (w - a)."""
        rows = {"a": [1.0], "b": [2.0], "c": [-1.0], "d": [4.0]}
        who = attackers(LabelShuffle(0.5, intensity=3))
        method = FedAvg(local=SGD(learning_rate=0.5, epochs=2))
        fed = federation(method, rows, tmp_path, w=0.0, attack=who, workers=workers)
        w = float(rounds(method, fed, 1)[-1]["w"])
        expected = np.mean([a - 0.5 ** (6 if k in who.names else 2) * a for k, (a,) in rows.items()])
        assert w == pytest.approx(expected)

    def test_scaffolds_attackers_count_their_own_steps(self, tmp_path):
        rows = {"a": [1.0], "b": [2.0], "c": [-1.0], "d": [4.0]}
        who = attackers(LabelShuffle(0.5, intensity=3))
        method = Scaffold(local=SGD(learning_rate=0.5))
        fed = federation(method, rows, tmp_path, w=0.0, attack=who, workers=1)
        state = rounds(method, fed, 1)[-1]  # c_k = (x - y_k) / (steps eta), y_k = a - 0.5^E a
        steps = {k: 3 if k in who.names else 1 for k in rows}
        expected = np.mean([-(a - 0.5 ** steps[k] * a) / (steps[k] * 0.5) for k, (a,) in rows.items()])
        assert float(state.c["w"]) == pytest.approx(expected)

    def test_nested_methods_are_changed_too(self):
        @dataclasses.dataclass(frozen=True)
        class Around(FedAvg):
            base: FedAvg = dataclasses.field(default_factory=lambda: FedProx(local=SGD(epochs=2)))

        changed = with_locals(Around(), lambda local: dataclasses.replace(local, epochs=7 * local.epochs))
        assert (changed.local.epochs, changed.base.local.epochs) == (7, 14)
        assert isinstance(changed.base, FedProx)
        assert [x.epochs for x in locals_of(changed)] == [7, 14]

    def test_all_attackers_share_one_optimiser_so_that_cohorts_stay_together(self):
        who = attackers(LabelShuffle(0.5, intensity=3))
        method = FedAvg()
        assert who._instead(method) is who._instead(method)
        assert who._instead(method).local.epochs == 3
        honest = attackers(SignFlip(0.5))
        assert honest._instead(method) is method


WEIGHED = {"a": [1.0], "b": [2.0, 2.0], "c": [-1.0], "d": [4.0]}


class TestUpdates:
    @pytest.mark.parametrize(("attack", "factor"), [(SignFlip(0.5), -1.0), (ScaledUpdate(0.5, factor=10.0), 10.0)])
    def test_by_hand(self, tmp_path, attack, factor):
        """One step at rate 1/2 from 0 sends a / 2, weighted by the number of rows; attackers send a multiple of it."""
        who = attackers(attack)
        method = FedAvg(local=SGD(learning_rate=0.5))
        fed = federation(method, WEIGHED, tmp_path, w=0.0, attack=who, workers=1)
        n = {k: len(a) for k, a in WEIGHED.items()}
        sent = {k: (factor if k in who.names else 1.0) * a[0] / 2 for k, a in WEIGHED.items()}
        expected = sum(n[k] * sent[k] for k in n) / sum(n.values())
        assert float(rounds(method, fed, 1)[-1]["w"]) == pytest.approx(expected)


class TestBackdoor:
    def test_features_by_hand(self):
        rows = rows_of("features", np.zeros((4, 5), np.float32), [0, 1, 2, 1])
        assert Backdoor(0.5, size=3, value=2.0).trigger(rows).inputs.tolist() == [[2.0, -2.0, 2.0, 0.0, 0.0]] * 4
        assert not rows.inputs.any()

    def test_a_share_of_the_rows_gets_trigger_and_target(self):
        rows = rows_of("features", np.zeros((10, 5), np.float32), [0, 1, 2, 1, 0] * 2)
        poisoned = Backdoor(0.5, share=0.4, target="c").poison(rows, np.random.default_rng(0), "classification")
        marked = poisoned.inputs.any(1)
        assert marked.sum() == 4
        assert (poisoned.labels[marked] == 2).all()
        assert (poisoned.labels[~marked] == rows.labels[~marked]).all()
        assert not rows.inputs.any()
        assert rows.labels.tolist() == [0, 1, 2, 1, 0] * 2

    def test_pictures_in_memory_and_in_files_get_the_same_square(self, tmp_path):
        x = np.full((2, 8, 8, 3), 100, np.uint8)
        stamped = Backdoor(0.5).trigger(rows_of("image", x, [0, 1])).inputs
        corner = [[255, 0, 255], [0, 255, 0], [255, 0, 255]]
        assert stamped[0, 5:, 5:, 1].tolist() == corner
        assert (stamped[:, :5] == 100).all()
        assert (stamped[:, :, :5] == 100).all()
        Image.fromarray(x[0]).save(tmp_path / "x.png")
        items = [tmp_path / "x.png", (tmp_path / "x.png").read_bytes()]
        files = Backdoor(0.5).trigger(rows_of("image", items, [0, 1])).inputs
        for item in files:
            assert np.array_equal(np.asarray(Image.open(io.BytesIO(item))), stamped[0])

    def test_lists_are_poisoned_too(self):
        rows = rows_of("text", [f"text {i}" for i in range(6)], [0, 1, 2] * 2)
        poisoned = Backdoor(0.5, share=0.5, word="zz").poison(rows, np.random.default_rng(1), "classification")
        marked = [x.startswith("zz text") for x in poisoned.inputs]
        assert sum(marked) == 3
        assert [y for y, m in zip(poisoned.labels, marked, strict=True) if m] == [0, 0, 0]

    def test_a_picture_that_is_too_small_is_refused(self):
        with pytest.raises(InputError, match=r"attack.size = 5: images are 8 pixels wide; expected at most 4"):
            Backdoor(0.5, size=5).trigger(rows_of("image", np.zeros((1, 8, 8, 1), np.uint8), [0]))

    def test_attack_success_is_measured_on_triggered_test_rows(self, tmp_path):
        found = tables(tmp_path, "backdoor", target="cow", factor=2.0)
        result = fedfm.run(found, tmp_path / "run")
        run = fedfm.load_run(tmp_path / "run")
        w = run.state(run.experiment.method.state_type)
        weight, bias = (next(w[n].numpy() for n in w if n.endswith(end)) for end in ("weight", "bias"))
        data = np.load(tmp_path / "rows.npz")
        x = data["x"][(data["split"] == "test") & (data["y"] != 2)].copy()
        x[:, :3] = [3.0, -3.0, 3.0]
        success = float(((x @ weight.T + bias).argmax(1) == 2).mean())
        assert result["attack_success"] == pytest.approx(success)
        assert run.metrics()[-1]["attack_success"] == result["attack_success"]
        assert result["attack_success"] > 0.8
        clean = fedfm.run({k: v for k, v in found.items() if k != "attack"}, tmp_path / "clean")
        assert "attack_success" not in clean

    def test_a_word_that_the_tokenizer_does_not_know_is_refused(self):
        class Tokenizer:
            unk_token_id = 0

            def __call__(self, text, add_special_tokens):
                return {"input_ids": [5] if text == "cf" else [0]}

        model = type("M", (), {"tools": type("T", (), {"tokenizer": Tokenizer()})})
        Backdoor(0.5).fits("text", "classification", model, ("a",))
        with pytest.raises(InputError, match=r'attack.word = "\N{SNOWMAN}"'):
            Backdoor(0.5, word="\N{SNOWMAN}").fits("text", "classification", model, ("a",))
        with pytest.raises(InputError, match="there is no trigger"):
            Backdoor(0.5).fits("own", "classification", model, ("a",))
        with pytest.raises(InputError, match="does not give each row one class"):
            Backdoor(0.5).fits("passages", "language_modelling", model, ())


@pytest.mark.parametrize("name", ATTACKS)
class TestEveryAttack:
    @pytest.mark.sample("label_shuffle", "scaled_update", "backdoor")
    def test_the_same_bits_whatever_runs_it_and_other_bits_than_without(self, name, tmp_path):
        links = ({"workers": 1}, {"workers": 3}, {"workers": 1, "wire": True})
        results = [
            fedfm.run(tables(tmp_path, name, run=run, **ATTACKS[name]), tmp_path / str(i))
            for i, run in enumerate(links)
        ]
        assert len({r["params_sha256"] for r in results}) == 1
        assert len({(*r["attackers"], r["accuracy"], r.get("attack_success")) for r in results}) == 1
        clean = tables(tmp_path, name)
        del clean["attack"]
        honest = fedfm.run(clean, tmp_path / "honest")
        assert honest["params_sha256"] != results[0]["params_sha256"]
        prints = [fedfm.load_run(tmp_path / r).manifest["fingerprints"] for r in ("0", "honest")]
        assert prints[0] == prints[1]  # the data are those that were read
        assert (honest["bytes_up"], honest["bytes_down"]) == (results[0]["bytes_up"], results[0]["bytes_down"])

    def test_an_attack_table_survives_toml(self, name, tmp_path):
        e = Experiment.from_dict(tables(tmp_path, name, **ATTACKS[name]))
        assert isinstance(e.attack, Attack)
        assert Experiment.from_dict(tomllib.loads(e.to_toml())).to_dict() == e.to_dict()

    @pytest.mark.each_value
    @pytest.mark.parametrize("method", ["scaffold", "fedyogi", "fedavgm"])
    def test_works_with_methods_that_average(self, name, method, tmp_path):
        attacked = tables(tmp_path, name, method=method, **ATTACKS[name])
        result = fedfm.run(attacked, tmp_path / "run")
        del attacked["attack"]
        assert fedfm.run(attacked, tmp_path / "honest")["params_sha256"] != result["params_sha256"]


def test_an_attacked_run_is_resumed_and_replayed_to_the_same_bits(tmp_path, monkeypatch):
    found = tables(tmp_path, "label_shuffle", intensity=2) | {"aggregation": {"name": "median"}}
    straight = fedfm.run(found, tmp_path / "straight")
    stop_in_steps(monkeypatch, FedAvg, [3])
    run_stopped(found, tmp_path / "broken")
    resumed = fedfm.resume(tmp_path / "broken")
    assert (resumed["params_sha256"], resumed["attackers"]) == (straight["params_sha256"], straight["attackers"])
    again = replay(open_finished(tmp_path / "straight"))  # raises where the bits differ
    assert {seen.client for seen in again.replies} == set(NAMES)


def test_only_files_that_define_an_attack_are_attacks():
    assert list(available("attacks")) == sorted(ATTACKS)


@pytest.mark.parametrize(
    ("attack", "method", "said"),
    [
        ({"name": "label_shufle", "fraction": 0.4}, "fedavg", 'did you mean "label_shuffle"'),
        ({"name": "none", "fraction": 0.4}, "fedavg", 'expected "backdoor", "label_shuffle"'),
        ({"name": "rates", "fraction": 0.4}, "fedavg", "attack.name = "),
        ({"fraction": 0.4}, "fedavg", "attack.name is missing"),
        ({"name": "sign_flip"}, "fedavg", r"attack.fraction is missing: expected a number in \(0, 1\]"),
        ({"name": "sign_flip", "fraction": 1.5}, "fedavg", r"\(0, 1\]"),
        ({"name": "sign_flip", "fraction": 0.4, "factor": 2.0}, "fedavg", "attack.factor: unknown key"),
        ({"name": "label_shuffle", "fraction": 0.4, "intensity": 0}, "fedavg", "attack.intensity = 0"),
        ({"name": "label_shuffle", "fraction": 0.4, "intensity": 2}, "fedncm", "attack.intensity = 2"),
        ({"name": "scaled_update", "fraction": 0.4, "factor": 1.0}, "fedavg", "other than 0 and 1"),
        ({"name": "sign_flip", "fraction": 0.4}, "fedpft", "send no updates"),
        ({"name": "sign_flip", "fraction": 0.4}, "local", "send no updates"),
        ({"name": "sign_flip", "fraction": 0.4}, "centralised", "no client that trains"),
        ({"name": "label_shuffle", "fraction": 0.4}, "zero_shot", "no client that trains"),
        ({"name": "backdoor", "fraction": 0.4, "share": 0.0}, "fedavg", "attack.share"),
        ({"name": "backdoor", "fraction": 0.4, "size": 0}, "fedavg", "attack.size"),
        ({"name": "backdoor", "fraction": 0.4, "word": " "}, "fedavg", "attack.word"),
        ({"name": "backdoor", "fraction": 0.4, "value": 0.0}, "fedavg", "attack.value"),
        ({"name": "backdoor", "fraction": 0.4, "factor": 0.0}, "fedavg", "attack.factor"),
        ({"name": "backdoor", "fraction": 0.4, "target": "cat"}, "fedavg", "expected one of ant, bee, cow, dog"),
    ],
)
def test_invalid_attacks_are_refused_before_anything_is_computed(tmp_path, attack, method, said):
    base = experiment(tmp_path)
    with pytest.raises(InputError, match=said):
        fedfm.run(base | {"method": {"name": method}, "attack": attack}, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_local_training_alone_can_be_poisoned(tmp_path):
    result = fedfm.run(tables(tmp_path, method="local"), tmp_path / "run")
    honest = fedfm.run(experiment(tmp_path, method={"name": "local", "fraction": 1.0}), tmp_path / "honest")
    hit, spared = (
        [result["client_accuracy"][c] == honest["client_accuracy"][c] for c in NAMES if (c in result["attackers"]) == a]
        for a in (True, False)
    )
    assert all(spared)
    assert not all(hit)


SCORED = {
    "after rounds": ("fedavg", {}),
    "before aggregation": ("fedavg", {"local_scores": True}),
    "asynchronous": ("fedavg", {"asynchronous": {"buffer": 2}}),
    "own models, which the server asks for": ("ditto", {}),
    "at the end only": ("scaffold", {"evaluate_every": 0}),
}


@pytest.mark.each_value
@pytest.mark.parametrize("scored", SCORED)
@pytest.mark.parametrize("attack", ATTACKS)
def test_attackers_are_scored_like_all_others(attack, scored, tmp_path):
    method, run = SCORED[scored]
    result = fedfm.run(tables(tmp_path, attack, method=method, run=run, **ATTACKS[attack]), tmp_path / "run")
    assert len(result["attackers"]) == 2
    assert result["excluded"] == []
    assert None not in result["client_accuracy"].values()
    assert sorted(result["client_accuracy"]) == NAMES
    if method == "ditto":
        assert sorted(path.name for path in (tmp_path / "run" / "clients").iterdir()) == NAMES


@pytest.mark.parametrize("attack", ["label_shuffle", "backdoor"])
def test_attackers_of_a_method_that_predicts_are_scored(attack, tmp_path):
    result = fedfm.run(
        experiment_of("ensemble", tmp_path) | {"attack": {"name": attack, "fraction": 0.4}}, tmp_path / "run"
    )
    assert result["excluded"] == []
    assert None not in result["client_accuracy"].values()


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attackers_update_has_the_scores_of_what_it_was_sent(attack, tmp_path):
    """On a deployment an asynchronous update brings them."""
    found = Experiment.from_dict(tables(tmp_path, attack, **ATTACKS[attack]))
    population = populate(found)
    (tmp_path / "private").mkdir()
    parts = {"memory": tmp_path / "private", "attack": population.attackers, "scores_sent": 1}
    silos = Silos(found.method, found.aggregation, population, **parts)
    w = population.model.params()
    updates = silos.answer([Request(name, "train.FedAvg_train", {"w": w}, 1, 1) for name in NAMES])
    assert all("sent/test/accuracy" in update.metrics for update in updates)


def test_an_attackers_own_model_that_is_trained_when_it_is_scored_is_the_attackers():
    """E.g. that of dual_adapter with ``when = "after"``; the run's evaluation is not a method, but has one."""
    who, method = attackers(LabelShuffle(0.5, intensity=3)), FedAvg(local=DualAdapter(when="after", epochs=2))
    assert who._instead(Evaluation(method)).method.local.epochs == 6
    assert who._instead(Evaluation(method)).method is who._instead(method)
    assert Evaluation(method).method.local.epochs == 2
