"""Exact aggregations of LoRA: by hand, the weighted sum itself, unequal ranks against a truly smaller adapter."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedfm
import tiny_text
from fedfm.api import predict
from fedfm.config.experiment import Experiment
from fedfm.core.client import Client, ClientData
from fedfm.errors import InputError
from fedfm.linalg import low_rank
from fedfm.linalg.params import Params
from fedfm.methods import fedex_lora, flexlora
from fedfm.methods._lora_products import Merged, Term, add, as_factors, as_params, average, delta_w
from fedfm.methods.fedex_lora import FedExLoRA
from fedfm.methods.flora import FLoRA
from fedfm.models.adapters import lora
from fedfm.models.load import load_model
from fedfm.models.quiet import quiet
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.training import SGD, AdamW, any_rank
from fedfm.training.scheduler import train_client
from small import checked

A, B, HEAD = "q.lora_A.default.weight", "q.lora_B.default.weight", "head.weight"
METHODS = ("flora", "flexlora", "fedex_lora", "raflora")


def adapter(b, a, head=0.0):
    return Params({A: torch.as_tensor(a).float(), B: torch.as_tensor(b).float(), HEAD: torch.tensor([float(head)])})


def unit(k):
    """B_k = e_k, A_k = e_k^T."""
    e = torch.eye(2)[:, k : k + 1]
    return adapter(e, e.T, head=k)


def dense(x):
    return x[0].double() @ x[1].double()


# --- by hand: B_k = e_k, A_k = e_k^T, p = 1/2, s = alpha / r = 1 ------------------------------------------------------

HALVES = [Term(0.5, unit(0)), Term(0.5, unit(1))]


def test_the_exact_aggregate_and_floras_stack_are_half_the_identity():
    x = delta_w(HALVES, alpha=1.0)["q"]
    assert torch.equal(dense(x), torch.eye(2, dtype=torch.float64) / 2)
    once = add(Params({}), {"q": x})
    torch.testing.assert_close(dense(as_factors(once)["q"]), torch.eye(2, dtype=torch.float64) / 2)
    torch.testing.assert_close(dense(as_factors(add(once, {"q": x}))["q"]), torch.eye(2, dtype=torch.float64))
    assert float(average(HALVES, [HEAD])[HEAD]) == 0.5


def test_the_mean_of_factors_is_a_quarter_and_fedex_adds_the_rest():
    mean = unit(0).replace(average(HALVES, list(unit(0))))
    assert torch.equal(dense(lora.factors(mean, 1.0)["q"]), torch.full((2, 2), 0.25, dtype=torch.float64))
    rest = dense(fedex_lora.residual(HALVES, mean, 1.0)["q"])
    assert torch.equal(rest, torch.tensor([[0.25, -0.25], [-0.25, 0.25]], dtype=torch.float64))


def test_flexlora_cuts_two_equal_singular_values_to_one():
    tensors, sigma = flexlora.cut(delta_w(HALVES, 1.0), unit(0), 1.0)
    torch.testing.assert_close(sigma[0], torch.tensor([0.5, 0.5], dtype=torch.float64))
    assert flexlora.truncation_error(sigma, 1) == pytest.approx(0.25)
    assert flexlora.truncation_error(sigma, 0) == pytest.approx(0.5)
    assert float((tensors[B] @ tensors[A]).norm()) == pytest.approx(0.5)


def test_unequal_ranks_have_their_own_scale():
    # alpha = 4: rank 1 has s = 4, rank 2 has s = 2. 3/4 * 4 * e_1 e_1^T + 1/4 * 2 * I = diag(3.5, 0.5).
    two = adapter(torch.eye(2), torch.eye(2))
    x = delta_w([Term(0.75, unit(0)), Term(0.25, two)], alpha=4.0)["q"]
    assert torch.equal(dense(x), torch.diag(torch.tensor([3.5, 0.5], dtype=torch.float64)))
    # The first row and column of a rank-2 adapter, at the scale of rank 1: e_1 e_1^T alone is left.
    one = lora.first(two, 1)
    assert one[B].tolist() == [[0.5], [0.0]]
    assert torch.equal(dense(lora.factors(one, 4.0)["q"]), torch.diag(torch.tensor([2.0, 0.0], dtype=torch.float64)))


# --- any ranks -------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 10**6),
    d_in=st.integers(1, 8),
    d_out=st.integers(1, 8),
    clients=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 50)), min_size=1, max_size=5),
    alpha=st.floats(0.5, 32),
)
def test_all_three_aggregate_the_weighted_sum_of_products(seed, d_in, d_out, clients, alpha):
    generator = torch.Generator().manual_seed(seed)
    n = sum(weight for _, weight in clients)
    found, expected = [], torch.zeros(d_out, d_in, dtype=torch.float64)
    for r, weight in clients:
        b, a = (torch.randn(shape, generator=generator) for shape in ((d_out, r), (r, d_in)))
        found.append(Term(weight / n, adapter(b, a)))
        expected += weight / n * alpha / r * b.double() @ a.double()
    x = delta_w(found, alpha)
    torch.testing.assert_close(dense(low_rank.compress(x["q"])), expected, rtol=1e-9, atol=1e-9)
    most = max(r for r, _ in clients)
    like = adapter(torch.zeros(d_out, most), torch.zeros(most, d_in))
    tensors, sigma = flexlora.cut(x, like, alpha)
    truth = torch.linalg.svdvals(expected)
    error = (expected - alpha / most * tensors[B].double() @ tensors[A].double()).norm() ** 2
    scale = float(expected.norm()) + 1
    assert float(error) == pytest.approx(float(truth[most:].square().sum()), abs=1e-5 * scale**2)
    assert flexlora.truncation_error(sigma, most) == pytest.approx(
        float(truth[most:].square().sum()), abs=1e-9 * scale**2
    )
    for r in range(1, most + 1):  # what a client of rank r gets is the best of its rank, too
        small = lora.factors(lora.first(like.replace(tensors), r), alpha)["q"]
        best = float(truth[r:].square().sum())
        assert float((expected - dense(small)).norm() ** 2) == pytest.approx(best, abs=1e-5 * scale**2)
    wide = [Term(p, lora.widen(w, like.layout)) for p, w in found]
    for term, (_, w) in zip(wide, found, strict=True):
        same = dense(lora.factors(w, alpha)["q"])
        torch.testing.assert_close(dense(lora.factors(term.w, alpha)["q"]), same, rtol=1e-5, atol=1e-5)
    mean = like.replace(average(wide, [A, B]))
    residual = fedex_lora.residual(found, mean, alpha)
    state = Merged(mean, as_params(residual), alpha)
    for r in range(1, most + 1):  # a client of any rank has the same weights
        own, beside = lora.factors(lora.first(mean, r), alpha)["q"], as_factors(fedex_lora.frozen_part(state, r))
        torch.testing.assert_close(dense(own) + dense(beside["q"]), expected, rtol=1e-4, atol=1e-5 * scale)
    whole = dense(lora.factors(mean, alpha)["q"]) + dense(residual["q"])
    torch.testing.assert_close(whole, expected, rtol=1e-9, atol=1e-9)


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10**6), r=st.integers(1, 4), more=st.integers(1, 9), alpha=st.floats(0.5, 32))
def test_an_adapter_and_a_shift_are_one_wider_adapter(seed, r, more, alpha):
    generator = torch.Generator().manual_seed(seed)
    w = adapter(torch.randn(5, r, generator=generator), torch.randn(r, 7, generator=generator), head=3)
    shift = {"q": (torch.randn(5, more, generator=generator), torch.randn(more, 7, generator=generator))}
    wide = lora.merge(w, shift, alpha)
    assert lora.rank_of(wide) == r + more
    expected = dense(lora.factors(w, alpha)["q"]) + dense(shift["q"])
    torch.testing.assert_close(dense(lora.factors(wide, alpha)["q"]), expected, rtol=1e-5, atol=1e-4)
    assert float(wide[HEAD]) == 3
    idle = lora.merge(w.replace({B: torch.zeros(5, r)}), shift, alpha)
    assert lora.rank_of(idle) == more  # an adapter that adds nothing is not carried along


# --- in a model ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_text.save_all(tmp_path_factory.mktemp("models"))


def tables(folder, name, model="bert", rounds=2, rank=4, **keys):
    return tiny_text.tables(folder, name, model, rounds, lora={"rank": rank, "alpha": 8.0}, **keys)


def model_of(folder, kind="bert", rank=4, seed=0, **adaptation):
    return load_model(
        ModelSpec(str(folder / kind), adaptation=AdaptationSpec("lora", rank=rank, alpha=8.0, **adaptation)),
        classes=("a", "b", "c"),
        kind="text",
        task="classification",
        seed=seed,
    )


def rows_of(model, n=24):
    rng = np.random.default_rng(0)
    tokens = tuple(torch.from_numpy(rng.integers(5, 40, rng.integers(2, 9))) for _ in range(n))
    from fedfm.core.rows import Rows

    return Rows(tokens=tokens, labels=torch.from_numpy(rng.integers(0, 3, n)))


def noisy(w, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return w.map(lambda t: t + 0.2 * torch.randn(t.shape, generator=generator))


@pytest.mark.parametrize("local", [SGD(0.05, epochs=2, batch_size=8), AdamW(0.01, epochs=2, batch_size=8)])
@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_a_low_rank_in_a_larger_model_trains_like_a_truly_smaller_adapter(folder, kind, local):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    model, small = model_of(folder, kind, rank=4), model_of(folder, kind, rank=2)
    rows = rows_of(model)
    start = noisy(small.params())
    client = Client("k", ClientData(lambda: rows, lambda: rows, lambda: rows), model, {}, seed=3, trainer=train_client)
    method = FLoRA(local=local)
    before = [p.clone() for p in model.module.parameters() if not p.requires_grad]
    found = any_rank.fit(method.local, client, start)
    assert found.layout is start.layout
    assert {m.scaling["default"] for m in model.module.modules() if hasattr(m, "lora_A")} == {2.0}  # as before

    # The same steps on an adapter of rank 2 that PEFT builds, with torch's own optimiser.
    with quiet():
        plain = AutoModelForSequenceClassification.from_pretrained(folder / kind, num_labels=3, pad_token_id=0)
        config = LoraConfig(
            r=2,
            lora_alpha=8,
            target_modules=["query", "value"] if kind == "bert" else ["q_proj", "v_proj"],
            modules_to_save=["classifier" if kind == "bert" else "score"],
        )
        theirs = get_peft_model(plain, config).eval()
    parameters = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, tensor in start.items():
            parameters[name].copy_(tensor)
    trained = [parameters[name] for name in start]
    eta = local.learning_rate
    optimiser = torch.optim.SGD(trained, eta) if type(local) is SGD else torch.optim.AdamW(trained, eta, weight_decay=0)
    from fedfm.training.local_job import Job

    for index in Job(client, start, local).orders():
        batch = rows.batch(index)
        out = theirs(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(out, batch["labels"]).backward()
        optimiser.step()
    expected = Params({name: parameters[name] for name in start})
    assert (expected - start).norm() > 0.01
    assert (found - expected).norm() / (expected - start).norm() < 1e-5
    after = [p for p in model.module.parameters() if not p.requires_grad]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("kind", ["bert", "llama", "gpt2"])
@pytest.mark.parametrize("rank", [1, 40])  # by the factors, and by the dense matrix
def test_a_shift_acts_as_the_added_weight(folder, kind, rank):
    from tiny_text import save_gpt2

    if kind == "gpt2" and not (folder / kind).exists():
        save_gpt2(folder / kind)
    model = model_of(folder, kind, rank=2)
    model.load(noisy(model.params()))
    rows = rows_of(model)
    generator = torch.Generator().manual_seed(1)
    shift, plain = {}, model.predict(rows)
    for path in lora.pairs(model.names):
        layer = model.module.get_submodule(path)
        u = torch.randn(layer.out_features, rank, generator=generator)
        shift[path] = (u, torch.randn(rank, layer.in_features, generator=generator) / rank)
    bits = {n: p.clone() for n, p in model.module.named_parameters()}
    with lora.shift_weights(model, shift):
        found = model.predict(rows)
        model.loss(rows.batch(range(4))).backward()
    gradient = {n: p.grad.clone() for n, p in model.live().items()}
    assert all(torch.equal(bits[n], p) for n, p in model.module.named_parameters())
    assert torch.equal(model.predict(rows), plain)
    assert (found - plain).abs().max() > 0.01

    with torch.no_grad():
        for path, (u, v) in shift.items():
            layer = model.module.get_submodule(path)
            weight = layer.base_layer.weight
            weight += (u @ v).T if layer.fan_in_fan_out else u @ v  # Conv1D keeps W^T
    torch.testing.assert_close(found, model.predict(rows), rtol=1e-4, atol=1e-5)
    for p in model.live().values():
        p.grad = None
    model.loss(rows.batch(range(4))).backward()
    for name, p in model.live().items():
        torch.testing.assert_close(gradient[name], p.grad, rtol=1e-3, atol=1e-5)


def test_kernels_that_read_weights_do_not_serve_a_shifted_model(folder):
    from fedfm.training import packed

    model = model_of(folder, "bert", rank=2)
    rows = rows_of(model)
    assert packed.applies(model, "exact")
    plain = model.predict(rows)
    shift = {p: (torch.ones(16, 1), torch.ones(1, 16)) for p in lora.pairs(model.names)}
    with lora.shift_weights(model, shift):
        assert not packed.applies(model, "exact")
        assert not torch.equal(model.predict(rows), plain)
    assert packed.applies(model, "exact")
    assert torch.equal(model.predict(rows), plain)
    with pytest.raises(RuntimeError, match="boom"), lora.scale_for_rank(model, 1), lora.shift_weights(model, shift):
        raise RuntimeError("boom")
    assert model.weights_overridden == 0
    assert torch.equal(model.predict(rows), plain)


# --- runs ------------------------------------------------------------------------------------------------------------


def crossings(run):
    lines = (json.loads(line) for line in (run.path / "messages.jsonl").read_text().splitlines())
    return [m for m in lines if m["counted"]]


@pytest.mark.sample("flexlora", "fedex_lora")
@pytest.mark.parametrize("name", METHODS)
def test_only_a_clients_own_rank_travels(folder, tmp_path, name):
    equal = fedfm.run(tables(folder, name, rounds=1), tmp_path / "equal")
    mixed = fedfm.run(tables(folder, name, rounds=1, ranks=[1, 2, 4]), tmp_path / "mixed")
    sites, width = 4, 16  # query and value of two layers
    entries = sites * 2 * width * 4  # of one rank: a row of A, a column of B
    assert equal["bytes_up"] - mixed["bytes_up"] == pytest.approx(entries * ((4 - 1) + (4 - 2)), abs=40)
    up = [m["bytes"] for m in crossings(fedfm.load_run(tmp_path / "mixed")) if m["to"] == "server"]
    assert up == sorted(up)
    assert len(set(up)) == 3
    if name != "flora":  # which sends stacked factors and no adapter
        assert equal["bytes_down"] - mixed["bytes_down"] == pytest.approx(entries * 5, abs=40)


@pytest.mark.sample("flora", "raflora")
@pytest.mark.parametrize("name", METHODS)
def test_the_first_round_is_the_same_aggregate(folder, tmp_path, name):
    """From B = 0, FlexLoRA at full rank cuts nothing, and FedEx-LoRA has FedAvg's factors and a residual beside."""
    fedfm.run(tables(folder, name, rounds=1, rank=16), tmp_path / name)
    fedfm.run(tables(folder, "fedavg", rounds=1, rank=16), tmp_path / "fedavg")
    run, _, w = predict.load(tmp_path / name)
    state = run.state(run.experiment.method.state_type)
    found = lora.factors(w, 8.0)
    assert all((u @ v).norm() > 0 for u, v in found.values())
    if name in ("flexlora", "raflora"):  # rank 16 of 16 x 16: nothing is cut
        assert state.error == {"16": pytest.approx(0.0, abs=1e-9)}
        assert state.energy == pytest.approx(sum(float((u @ v).square().sum()) for u, v in found.values()), rel=1e-5)
    if name == "fedex_lora":
        mean = predict.load(tmp_path / "fedavg")[2]
        assert all(torch.allclose(state.w[n], mean[n], atol=1e-6) for n in mean)  # factors are averaged as FedAvg does
        assert any((u @ v).norm() > 1e-4 for u, v in as_factors(state.shift).values())


@pytest.mark.sample("bert-flora", "llama-flexlora")
@pytest.mark.each_value
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("model", ["bert", "llama"])
def test_the_adapter_on_disk_is_the_model_that_was_scored(folder, tmp_path, name, model):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    result = fedfm.run(tables(folder, name, model, rounds=3, fraction=0.67, ranks=[2, 4]), tmp_path / "run")
    run, ours, w = predict.load(tmp_path / "run")
    with quiet():
        auto, labels = (
            (AutoModelForSequenceClassification, {"num_labels": 3}) if model == "bert" else (AutoModelForCausalLM, {})
        )
        base = auto.from_pretrained(folder / model, pad_token_id=0, **labels)
        theirs = PeftModel.from_pretrained(base, str(tmp_path / "run" / "adapter")).eval()
    tokens = torch.arange(5, 17)[None]
    with torch.no_grad():
        expected = theirs(input_ids=tokens).logits
        plain = ours.module(input_ids=tokens).logits
    torch.testing.assert_close(plain, expected, rtol=1e-5, atol=1e-5)
    # As the run itself judges: the model of rank 4, the rest as a shift.
    narrow = load_model(
        run.experiment.model, classes=tuple(ours.classes), kind="text", task=run.experiment.model.task, seed=1
    )
    assert lora.rank_of(narrow.params()) == 4
    with torch.no_grad(), lora.apply(narrow, w):
        torch.testing.assert_close(narrow.module(input_ids=tokens).logits, expected, rtol=1e-5, atol=1e-5)
    assert result["loss"] > 0
    for to in ("peft", "hf", "torch"):
        predict.export(tmp_path / "run", to, tmp_path / to)
    with quiet():
        again = auto.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=tokens).logits, expected, rtol=1e-4, atol=1e-5)
    (tmp_path / "new.jsonl").write_text((folder / "rows.jsonl").read_text())
    told = predict.predict(tmp_path / "run", tmp_path / "new.jsonl")
    assert told["perplexity"] if model == "llama" else set(told["predictions"]) <= {"fish", "bird", "plant"}


@pytest.mark.sample("flora", "flexlora")
@pytest.mark.parametrize("name", METHODS)
def test_fast_kernels_give_nearly_the_same(folder, tmp_path, name):
    """Clients of a packed chunk take turns at one model: a shift must never meet another client's training."""
    slow = fedfm.run(tables(folder, name, rounds=3, ranks=[2, 4]), tmp_path / "exact")
    fast = fedfm.run(tables(folder, name, rounds=3, run={"kernels": "fast"}, ranks=[2, 4]), tmp_path / "fast")
    assert fast["loss"] == pytest.approx(slow["loss"], rel=1e-3)


def test_a_client_that_was_away_has_the_same_weights(folder, tmp_path):
    """Nothing is kept at a client: what it is sent in a round is all that it needs."""
    fedfm.run(tables(folder, "flora", rounds=4, fraction=0.34), tmp_path / "run")
    assert not list((tmp_path / "run" / "private" / "memory").glob("*/r*.safetensors"))
    run = fedfm.load_run(tmp_path / "run")
    assert len({tuple(line["cohort"]) for line in run.metrics() if line["round"]}) > 1


def test_a_reply_of_another_rank_is_left_out(folder, tmp_path, monkeypatch):
    class Odd(Params):
        def __sub__(self, other):
            return lora.first(super().__sub__(other), 1)

    fit = any_rank.fit

    def odd(local, client, w):
        trained = fit(local, client, w)
        return Odd(trained) if client.id == "client-02" else trained

    monkeypatch.setattr(any_rank, "fit", odd)
    result = fedfm.run(tables(folder, "flexlora", rounds=1, ranks=[2]), tmp_path / "run")
    assert [(e["client"], e["code"]) for e in result["excluded"]] == [("client-02", "E_SHAPE")]
    assert "shape (1, 16), expected (2, 16)" in result["excluded"][0]["reason"]


def test_the_cut_is_reported(folder, tmp_path):
    details = fedfm.run(tables(folder, "flexlora", ranks=[1, 4]), tmp_path / "run")["details"]["cut"]
    assert set(details["share"]) == {"1", "4"}
    assert 0 <= details["share"]["4"] < details["share"]["1"] < 1


@pytest.mark.parametrize("name", METHODS)
def test_other_adaptations_are_refused(folder, name):
    wrong = tables(folder, name)
    wrong["model"]["adaptation"] = {"name": "ffa_lora"}
    with pytest.raises(InputError, match='takes "lora" only'):
        Experiment.from_dict(wrong)


def test_ranks_that_make_no_sense_are_refused(folder, tmp_path):
    with pytest.raises(InputError, match=r"above model\.adaptation\.rank = 4"):
        fedfm.run(tables(folder, "flora", ranks=[2, 8]), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(InputError, match="at least 1"):
        Experiment.from_dict(tables(folder, "flexlora", ranks=[0]))
    with pytest.raises(InputError, match="rounds"):
        checked(FedExLoRA(rounds=-1))


def test_a_cut_of_less_rank_leaves_the_other_rows_free_to_move():
    rng = torch.Generator().manual_seed(0)
    names = ("q.lora_A.default.weight", "q.lora_B.default.weight")
    like = Params(dict(zip(names, (torch.randn(3, 5, generator=rng), torch.randn(4, 3, generator=rng)), strict=True)))
    dw = torch.randn(4, 1, generator=rng).double(), torch.randn(1, 5, generator=rng).double()
    found, _ = flexlora.cut({"q": dw}, like, 6.0)
    a, b = (found[name].double() for name in names)
    torch.testing.assert_close(2 * b @ a, dw[0] @ dw[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(a @ a.T, torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-6)
    assert not b[:, 1:].any()
