"""Audits of the methods that train at clients: leaks are found, and a model that saw no rows is not accused."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import fedfm
import tiny_text
from fedfm.audits.audit import audits, choose, perform
from fedfm.audits.crossed import crossings
from fedfm.audits.inference import rates
from fedfm.audits.loss_drops import LossDrops
from fedfm.audits.model_membership import attack, final_models
from fedfm.audits.replay import open_finished, replay
from fedfm.cli import main
from fedfm.errors import InputError
from fedfm.runtime.population import populate
from fedfm.runtime.run_directory import Run
from small import experiment, pictures, tiny_vit

HARD = {"name": "sgd", "learning_rate": 0.5, "epochs": 20, "batch_size": 8}


def noise(folder, seed=0, n=240, d=40):
    """Rows whose labels have nothing to do with them: a model can only remember them."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(n, d)).astype(np.float32), rng.integers(0, 4, n)
    split = np.where(np.arange(n) % 2 == 0, "test", "train")
    np.savez(folder / "rows.npz", x=x, y=y, split=split, classes=np.array(list("abcd")))
    return folder


def run(folder, name="run", **changes):
    fedfm.run(experiment(folder, **changes), folder / name)
    return folder / name


def by_name(found):
    return {f.name: f for f in found}


@pytest.fixture(scope="module")
def remembered(tmp_path_factory):
    folder = noise(tmp_path_factory.mktemp("remembered"))
    data = {"partition": {"name": "iid", "clients": 3}}
    return run(folder, data=data, method={"local": HARD, "rounds": 3, "fraction": 1.0})


@pytest.mark.proof
def test_memorised_rows_are_found_in_the_model_and_in_the_updates(remembered):
    found = by_name(perform(remembered))
    names = {"model_membership", "model_membership_tpr", "update_membership", "label_counts", "head_rows"}
    assert set(found) == names | {"repeated_questions"}
    for name in ("model_membership", "update_membership"):
        assert found[name].verdict == "leaks"
        assert found[name].low > 0.6
    assert found["model_membership_tpr"].estimate > 0.05
    assert by_name(perform(remembered)) == found  # the same figures again
    assert len(json.loads((remembered / "audit.json").read_text())["findings"]) == 6


def test_a_model_that_saw_other_rows_is_not_accused(remembered, tmp_path):
    other = Run.open(
        run(noise(tmp_path, seed=1), data={"partition": {"name": "iid", "clients": 3}}, method={"local": HARD})
    )
    known = Run.open(remembered)
    population = populate(known.experiment)
    told, how = attack(known, population, final_models(other, population), lambda text: None)
    members, strangers = (np.concatenate([getattr(t, name) for t in told]) for name in ("members", "strangers"))
    assert "16 shadow runs" in how
    assert rates.auc(members, strangers) == pytest.approx(0.5, abs=0.12)  # 120 of each: three standard errors


def test_the_drop_of_a_loss_is_the_product_of_gradient_and_update(tmp_path):
    """In the limit of a short update; gradients by autograd, updates from the replay's own replies."""
    path = run(tmp_path, method={"local": {"learning_rate": 1e-3, "batch_size": 16}, "rounds": 1, "fraction": 1.0})
    known = open_finished(path)
    expected = {}

    class Products:
        def see(self, turn, population):
            for crossing in crossings(turn, known.experiment.method, population.model):
                (client,) = crossing.clients
                rows = population.data(client).train
                w = {n: crossing.start[n].clone().requires_grad_() for n in crossing.start}
                weight, bias = w.values()
                products = []
                for x, y in zip(rows.tensors["features"], rows.labels, strict=True):
                    g = torch.autograd.grad(F.cross_entropy(weight @ x + bias, y), [weight, bias])
                    products.append(-sum(float((a * d).sum()) for a, d in zip(g, crossing.delta.values(), strict=True)))
                expected[client] = np.array(products)

    drops = LossDrops(known)
    replay(known, watched={"products": Products(), "drops": drops}, keep=False)
    assert drops.updates == len(expected) == 5
    for client, products in expected.items():
        found = drops.found[client][: len(products)]
        assert found == pytest.approx(products, rel=0.1, abs=2e-4)
        assert np.corrcoef(found, products)[0, 1] > 0.999


def test_clients_of_one_row_send_it(tmp_path):
    data = {"limit": 12, "partition": {"name": "iid", "clients": 12}}
    found = by_name(perform(run(tmp_path, data=data, method={"rounds": 1, "fraction": 1.0}), ["head_rows"]))[
        "head_rows"
    ]
    assert (found.verdict, found.estimate) == ("leaks", 1.0)
    assert found.bound == 0.0
    assert found.detail["rebuilt"] == found.detail["rows"] == 12


def test_clients_of_many_rows_leak_label_counts_but_no_rows(tmp_path):
    data = {"partition": {"name": "dirichlet", "alpha": 0.3, "clients": 5}}
    found = by_name(perform(run(tmp_path, data=data), ["head_rows", "label_counts"]))
    assert found["head_rows"].verdict == "holds"
    counts = found["label_counts"]
    assert counts.verdict == "leaks"
    assert counts.estimate < counts.bound / 2


@pytest.mark.proof
@pytest.mark.parametrize("model", ["llama", pytest.param("gpt2", marks=pytest.mark.proof)])
def test_a_head_without_a_bias_gives_label_counts_and_says_why_it_gives_no_rows(tmp_path, model, monkeypatch):
    monkeypatch.setattr("fedfm.audits.label_counts.MOST", 40)
    tiny_text.texts(tmp_path / "rows.jsonl", 200)
    getattr(tiny_text, f"save_{model}")(tmp_path / model)
    data = {"path": str(tmp_path / "rows.jsonl"), "partition": {"name": "dirichlet", "alpha": 0.3, "clients": 4}}
    local = {"name": "adamw", "learning_rate": 0.02, "batch_size": 16}
    lora = {"name": str(tmp_path / model), "task": "classification", "adaptation": {"name": "lora", "rank": 2}}
    path = run(tmp_path, data=data, model=lora, method={"rounds": 1, "fraction": 1.0, "local": local})
    assert sum("bias" in name for name in load_file(path / "adapter/adapter_model.safetensors")) == 0
    found = by_name(perform(path, ["head_rows", "label_counts"]))
    assert found["head_rows"].estimate is None
    assert "a head without a bias" in found["head_rows"].says
    counts = found["label_counts"]
    assert counts.detail["clients"] == 4
    assert "the change of its weights" in counts.says
    assert counts.verdict == "leaks"
    assert counts.estimate < counts.bound / 2


def test_of_hidden_sums_the_sums_are_attacked(tmp_path):
    path = run(noise(tmp_path), aggregation={"name": "secure"}, method={"local": HARD, "rounds": 2, "fraction": 1.0})
    assert [*choose(Run.open(path))] == ["model_membership", "repeated_questions", "update_membership"]
    found = by_name(perform(path))
    assert found["update_membership"].detail["updates"] == 2  # a sum a round
    with pytest.raises(InputError, match="label_counts: the server saw only sums of updates"):
        perform(path, ["label_counts"])


@pytest.mark.proof
@pytest.mark.usefixtures("coarse_accounting")
def test_an_epsilon_bounds_what_is_found(tmp_path):
    privacy = {"mechanism": "dp_sgd", "unit": "record", "target_epsilon": 1.0, "delta": 1e-5, "clip_norm": 1.0}
    path = run(tmp_path, privacy=privacy, method={"rounds": 2, "fraction": 1.0})
    found = by_name(perform(path, ["update_membership"]))
    assert 0.5 < found["update_membership"].detail["allowed_by_epsilon"] < 1
    assert not any(f.contradicts for f in found.values())


@pytest.mark.parametrize("method", ["scaffold", "ditto", "fedala"])
def test_other_methods_are_attacked_under_the_models_that_their_clients_have(tmp_path, method):
    path = run(noise(tmp_path), method={"name": method, "local": {**HARD, "epochs": 5}, "rounds": 2})
    found = by_name(perform(path, ["model_membership", "update_membership"]))
    assert found["model_membership"].detail["clients"] == 4  # the fifth was in neither round
    assert found["model_membership"].estimate > 0.55
    assert found["update_membership"].detail["updates"] == 6  # two rounds of three clients


@pytest.mark.parametrize("method", ["fedex_lora", "flora"])
def test_exact_lora_is_attacked_with_what_was_merged(tmp_path, method):
    data = {"path": str(pictures(tmp_path, n=60)), "partition": {"name": "iid", "clients": 2}}
    model = {"name": str(tiny_vit(tmp_path)), "adaptation": {"name": "lora", "rank": 2}}
    path = run(tmp_path, data=data, model=model, method={"name": method, "rounds": 2, "fraction": 1.0})
    known, apart = open_finished(path), []

    class Ends:
        def see(self, turn, population):
            found = list(crossings(turn, known.experiment.method, population.model))
            after = known.experiment.method.params_for(turn.after, "")
            apart.extend(set(c.end) == set(after) for c in found)

    replay(known, watched={"ends": Ends()}, keep=False)
    assert apart == [True] * 4
    assert by_name(perform(path, ["update_membership"]))["update_membership"].detail["updates"] == 4


def test_help_says_which_attack_fits_what(capsys):
    with pytest.raises(SystemExit):
        main(["audit", "--help"])
    text = capsys.readouterr().out
    assert [name for name in audits() if name not in text] == []
