"""FedDPA and the client optimiser dual_adapter, against two adapters written out by hand on plain transformers."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.func import functional_call

import fedfm
import tiny_text
from fedfm import seeds
from fedfm.api import predict
from fedfm.api.join import join
from fedfm.config.experiment import Experiment
from fedfm.core.client import Client, ClientData
from fedfm.core.rows import Rows
from fedfm.data.table import Table
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.methods.fedavg import FedAvg
from fedfm.methods.feddpa import FedDPA
from fedfm.models.adapters import experts
from fedfm.models.adapters.experts import mean_direction, pair, share
from fedfm.models.adapters.pair_names import GLOBAL, LOCAL, MIX
from fedfm.models.load import load_model
from fedfm.models.quiet import quiet
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.models.text_metrics import answer_limit, answers
from fedfm.runtime import predictions
from fedfm.training import SGD, AdamW
from fedfm.training.local_job import Job
from fedfm.training.personal import DualAdapter
from fedfm.training.scheduler import train_client
from small import pictures, tiny_vit
from tiny_text import COMMON

ALPHA, RANK, CLASSES = 8.0, 2, ("a", "b", "c")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tiny_text.save_all(tmp_path_factory.mktemp("models"))
    rng = np.random.default_rng(0)
    with (path / "asked.jsonl").open("w") as file:
        for i in range(60):
            words = [str(w) for w in rng.choice(COMMON, rng.integers(2, 5))]
            row = {"instruction": " ".join(words), "output": words[0], "task": "xyz"[i % 3]}
            file.write(json.dumps(row | {"split": "test" if i % 4 == 0 else "train"}) + "\n")
    return path


def model_of(folder, kind, task="classification", **adaptation):
    spec = ModelSpec(
        str(folder / kind), task=task, adaptation=AdaptationSpec("lora", rank=RANK, alpha=ALPHA, **adaptation)
    )
    classes, data = (CLASSES, "text") if task == "classification" else ((), task)
    return load_model(spec, classes=classes, kind=data, task=task, seed=0)


def rows_of(n=24, seed=0):
    rng = np.random.default_rng(seed)
    tokens = tuple(torch.from_numpy(rng.integers(5, 27, rng.integers(2, 9))) for _ in range(n))
    return Rows(tokens=tokens, labels=torch.from_numpy(rng.integers(0, 3, n)))


def instruction_rows(model, n=9):
    rng = np.random.default_rng(1)
    pairs = [(" ".join(rng.choice(COMMON, rng.integers(1, 5))), " ".join(rng.choice(COMMON, 2))) for _ in range(n)]
    return model.prepare(Table("instruction", pairs, None, (), np.full(n, "train")), range(n))


def noisy(w, seed):
    generator = torch.Generator().manual_seed(seed)
    return w.map(lambda t: t + 0.2 * torch.randn(t.shape, generator=generator))


def client_of(model, rows, seed=3):
    return Client("k", ClientData(lambda: rows, lambda: rows, lambda: rows), model, {}, seed=seed, trainer=train_client)


def plain(folder, kind, head=True):
    """The model as transformers has it, in evaluation mode, frozen."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    with quiet():
        if not head:
            return AutoModelForCausalLM.from_pretrained(folder / kind).eval().requires_grad_(False)
        auto = AutoModelForSequenceClassification
        return auto.from_pretrained(folder / kind, num_labels=3, pad_token_id=0).eval().requires_grad_(False)


def mixed_weights(module, terms):
    """Weights of the plain model that are W + sum_i a_i (alpha / r) B_i A_i, and heads sum_i a_i head_i."""
    weights = {n: p.detach() for n, p in module.named_parameters()}
    for a, w in terms:
        for name, tensor in w.items():
            path = name.removeprefix("base_model.model.")
            if ".lora_A." in path:
                up = w[name.replace("lora_A", "lora_B")]
                key = path.partition(".lora_A.")[0] + ".weight"
                weights[key] = weights[key] + a * ALPHA / tensor.shape[0] * up @ tensor
            elif ".modules_to_save." in path:
                key = path.replace(".modules_to_save.default", "")
                before = weights[key] if key in seen_heads(terms, w) else 0.0
                weights[key] = before + a * tensor
    return weights


def seen_heads(terms, w):
    """Heads of the terms before w: the plain model's own random head does not count."""
    at = next(i for i, (_, other) in enumerate(terms) if other is w)
    return {
        name.removeprefix("base_model.model.").replace(".modules_to_save.default", "")
        for _, other in terms[:at]
        for name in other
        if ".modules_to_save." in name
    }


def logits_by_hand(module, terms, tokens):
    return functional_call(module, mixed_weights(module, terms), kwargs={"input_ids": tokens[None]}).logits[0]


# --- two adapters at once ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bert", "llama"])
@pytest.mark.parametrize("a", [0.5, 0.2])
def test_both_adapters_put_out_together(folder, kind, a):
    model, rows, hf = model_of(folder, kind), rows_of(), plain(folder, kind)
    g, v = noisy(model.params(), 1), noisy(model.params(), 2)
    assert any(".modules_to_save." in name for name in g)
    method = FedDPA()
    found = predictions.logits(method, model, pair(g, v, a), rows)
    with torch.no_grad():
        expected = torch.stack([logits_by_hand(hf, [(a, v), (1 - a, g)], t) for t in rows.tokens])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    alone = predictions.logits(method, model, g, rows)
    assert (found - alone).abs().max() > 0.05
    assert model.weights_overridden == 0


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_each_row_has_one_mixing_weight(folder, kind):
    """The share by cosines written out, and every row through a model of its own."""
    model, rows, hf = model_of(folder, kind), rows_of(), plain(folder, kind)
    g, v = noisy(model.params(), 1), noisy(model.params(), 2)
    client = client_of(model, rows)
    client.memory["own_adapter"] = v
    local = DualAdapter(instances=3)
    own = local.own(client, g)
    assert own.part(GLOBAL).sha256() == g.sha256()
    assert own.part(LOCAL).sha256() == v.sha256()

    caught = []
    name = "classifier" if kind == "bert" else "score"
    hook = getattr(hf, name).register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    states = []
    with torch.no_grad():
        for t in rows.tokens:  # under the own adapter alone
            logits_by_hand(hf, [(1.0, v)], t)
            x = caught.pop()
            states.append(x[0] if kind == "bert" else x[0, -1])
    hook.remove()
    some = seeds.generator(client.seed, "instances").choice(len(rows), 3, replace=False)
    shares = [0.5 * np.mean([float(F.cosine_similarity(h, states[s], 0)) for s in some]) for h in states]
    shares = np.clip(shares, 0, 1)
    assert shares.max() - shares.min() > 0.05
    with torch.no_grad():
        expected = torch.stack(
            [logits_by_hand(hf, [(a, v), (1 - a, g)], t) for a, t in zip(shares.tolist(), rows.tokens, strict=True)]
        )
    method = FedDPA(local=local)
    torch.testing.assert_close(predictions.logits(method, model, own, rows), expected, rtol=1e-4, atol=1e-4)
    accuracy = float((expected.argmax(1) == rows.labels).float().mean())
    assert predictions.scores(method, model, own, rows)["accuracy"] == pytest.approx(accuracy)
    to_global = DualAdapter(instances=3, to="global").own(client, g)
    states = torch.stack(states)
    found = share(to_global.part(MIX), states)
    torch.testing.assert_close(found, torch.from_numpy(1 - shares).float().clamp(0, 1), rtol=1e-4, atol=1e-5)


def test_instructions_are_weighed_by_their_prompt_and_answered_by_both(folder):
    model, hf = model_of(folder, "llama", "instruction"), plain(folder, "llama", head=False)
    rows = instruction_rows(model)
    starts = rows.tensors["answer_start"].tolist()
    g, v = noisy(model.params(), 1), noisy(model.params(), 2)
    client = client_of(model, rows)
    client.memory["own_adapter"] = v
    local = DualAdapter(lambda_=1.0)
    own = local.own(client, g)
    own_weights = mixed_weights(hf, [(1.0, v)])
    with torch.no_grad():
        states = [
            functional_call(
                hf, own_weights, kwargs={"input_ids": t[None, :start], "output_hidden_states": True}
            ).hidden_states[-1][0, -1]
            for t, start in zip(rows.tokens, starts, strict=True)
        ]
        some = seeds.generator(client.seed, "instances").choice(len(rows), 5, replace=False)
        shares = [max(0.0, float(np.mean([float(F.cosine_similarity(h, states[s], 0)) for s in some]))) for h in states]
        assert max(shares) - min(shares) > 0.05
        nll, tokens, said = 0.0, 0, []
        for a, t, start in zip(shares, rows.tokens, starts, strict=True):
            weights = mixed_weights(hf, [(a, v), (1 - a, g)])
            z = F.log_softmax(functional_call(hf, weights, kwargs={"input_ids": t[None]}).logits[0].double(), -1)
            nll -= sum(float(z[i - 1, t[i]]) for i in range(start, len(t)))
            tokens += len(t) - start
            ids = t[:start]
            while len(ids) < start + answer_limit(model):
                ids = torch.cat(
                    [ids, functional_call(hf, weights, kwargs={"input_ids": ids[None]}).logits[0, -1:].argmax(-1)]
                )
                if int(ids[-1]) == hf.generation_config.eos_token_id:
                    break
            said.append(model.tools.tokenizer.decode(ids[start:], skip_special_tokens=True))
    scored = predictions.scores(FedDPA(local=local), model, own, rows)
    assert scored["loss"] == pytest.approx(nll / tokens, rel=1e-4)
    with experts.apply(model, own, rows) as judged:
        assert [a.text for a in answers(model, judged)] == said


@given(st.integers(0, 10**6), st.floats(-1, 1), st.floats(-3, 3))
def test_a_share_is_a_share(seed, bias, scale):
    generator = torch.Generator().manual_seed(seed)
    h, seen = torch.randn(6, 4, generator=generator), torch.randn(3, 4, generator=generator)
    m = mean_direction(seen)
    cosines = torch.stack([F.cosine_similarity(h, s[None], 1) for s in seen]).mean(0)
    found = share(Params({"bias": torch.tensor(bias), "slope": scale * m}), h)
    assert bool(((found >= 0) & (found <= 1)).all())
    torch.testing.assert_close(found, (bias + scale * cosines).clamp(0, 1), rtol=1e-4, atol=1e-5)


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.each_value
@pytest.mark.parametrize("rule", ["sgd", "adamw"])
@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_the_local_adapter_is_trained_while_the_global_one_is_frozen(folder, kind, rule):
    """Autograd through weights W + s/2 B A + s/2 B' A' of the plain model, torch's own optimiser."""
    model, rows, hf = model_of(folder, kind), rows_of(), plain(folder, kind)
    g, v = noisy(model.params(), 1), noisy(model.params(), 2)
    eta = 0.05 if rule == "sgd" else 0.01
    local = DualAdapter(optimiser=rule, learning_rate=eta, epochs=2, batch_size=8)
    client, bits = client_of(model, rows), g.sha256()
    client.memory["own_adapter"] = v
    sent = local(client, g)

    live = {n: t.clone().requires_grad_() for n, t in v.items()}
    optimiser = (
        torch.optim.SGD(live.values(), eta) if rule == "sgd" else torch.optim.AdamW(live.values(), eta, weight_decay=0)
    )
    for index in Job(client, v, local.plain).orders():
        logits = torch.stack([logits_by_hand(hf, [(0.5, live), (0.5, g)], rows.tokens[i]) for i in index])
        optimiser.zero_grad()
        F.cross_entropy(logits, rows.labels[index]).backward()
        optimiser.step()
    expected = Params(live)
    assert (expected - v).norm() > 0.01
    assert (client.memory["own_adapter"] - expected).norm() / (expected - v).norm() < (1e-4 if rule == "sgd" else 5e-3)

    # What is sent is what a client without an own adapter sends, bit for bit.
    alone = SGD(eta, epochs=2, batch_size=8) if rule == "sgd" else AdamW(eta, epochs=2, batch_size=8)
    assert sent.sha256() == alone(client_of(model, rows), g).sha256()
    assert g.sha256() == bits
    assert model.weights_overridden == 0


def test_the_first_own_adapter_is_the_one_that_was_sent(folder):
    model, rows = model_of(folder, "bert"), rows_of()
    g = noisy(model.params(), 1)
    client = client_of(model, rows)
    local = DualAdapter(learning_rate=1e-9, weight="fixed")
    assert local.own(client, g) is g
    local(client, g)
    torch.testing.assert_close(client.memory["own_adapter"].flats[torch.float32], g.flats[torch.float32])
    # Two halves of one adapter are that adapter.
    found = predictions.logits(FedDPA(local=local), model, local.own(client, g), rows)
    torch.testing.assert_close(found, predictions.logits(FedDPA(), model, g, rows), rtol=1e-4, atol=1e-5)


def test_the_local_adapter_is_trained_after_the_federation(folder, monkeypatch):
    model, rows = model_of(folder, "bert"), rows_of()
    g = noisy(model.params(), 1)
    local = DualAdapter(when="after", weight="fixed", epochs=2)
    client, calls = client_of(model, rows), []
    sent = local(client, g)
    assert sent.sha256() == SGD(epochs=2)(client_of(model, rows), g).sha256()
    assert dict(client.memory) == {}  # nothing of its own is trained in a round
    train_own = DualAdapter.train_own
    monkeypatch.setattr(DualAdapter, "train_own", lambda *args: calls.append(1) or train_own(*args))
    own = local.own(client, g)
    assert own.sha256() == local.own(client, g).sha256()
    assert len(calls) == 1
    expected = train_own(local, client_of(model, rows), g, g)
    assert own.part(LOCAL).sha256() == expected.sha256()
    local.own(client, sent)
    assert len(calls) == 2


# --- runs -------------------------------------------------------------------------------------------------------------


def tables(folder, name, kind="bert", rounds=2, run=None, instruction=False, **keys):
    local = {"name": "dual_adapter", "optimiser": "adamw", **keys.pop("local", {})}
    lora = {"rank": RANK, "alpha": ALPHA}
    found = tiny_text.tables(folder, name, kind, rounds, lora=lora, local=local, run=run, **keys)
    if instruction:
        found["data"] = {"path": str(folder / "asked.jsonl"), "partition": {"name": "by_column", "column": "task"}}
        found["model"]["task"] = "instruction"
    return found


def test_the_global_adapter_is_fedavgs(folder, tmp_path):
    """Nothing that clients keep reaches the server: its state is that of FedAvg with the same optimiser."""
    dual = tables(folder, "feddpa")
    fedfm.run(dual, tmp_path / "dual")
    dual["method"] |= {"name": "fedavg", "local": {"name": "adamw", "learning_rate": 0.05, "batch_size": 8}}
    fedfm.run(dual, tmp_path / "fedavg")
    states = [fedfm.load_run(tmp_path / name).state(Params) for name in ("dual", "fedavg")]
    assert states[0].sha256() == states[1].sha256()
    first, second = (fedfm.load_run(tmp_path / name).manifest["result"] for name in ("dual", "fedavg"))
    assert (first["bytes_up"], first["bytes_down"]) == (second["bytes_up"], second["bytes_down"])
    assert first["details"]["server_accuracy"] == pytest.approx(second["local_accuracy"])


@pytest.mark.proof
@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["bert", "llama"])
@pytest.mark.parametrize("name", ["feddpa", "fedbip"])
def test_same_bits_whatever_runs_it(folder, tmp_path, name, kind):
    results = [
        fedfm.run(tables(folder, name, kind, fraction=0.67, run=run), tmp_path / str(i))
        for i, run in enumerate(({}, {"workers": 2}, {"wire": True}))
    ]
    assert len({r["params_sha256"] for r in results}) == 1
    assert len({(r["accuracy"], r["global_accuracy"], r["loss"]) for r in results}) == 1
    assert results[0]["excluded"] == []
    assert set(results[0]["client_accuracy"]) == set(fedfm.load_run(tmp_path / "0").manifest["clients"])
    assert None not in results[0]["client_accuracy"].values()
    assert results[0]["loss"] > 0


@pytest.mark.proof
def test_fast_kernels_give_nearly_the_same(folder, tmp_path):
    slow, fast = (
        fedfm.run(tables(folder, "feddpa", rounds=3, run={"kernels": kernels}), tmp_path / kernels)
        for kernels in ("exact", "fast")
    )
    assert fast["loss"] == pytest.approx(slow["loss"], rel=1e-3)


@pytest.mark.proof
@pytest.mark.parametrize("when", ["during", "after"])
def test_the_adapters_on_disk(folder, tmp_path, when):
    """What PEFT loads is both at 1/2; what `predict` loads is what was judged."""
    from peft import PeftModel

    fedfm.run(tables(folder, "feddpa", local={"when": when}), tmp_path / "run")
    run, model, w = predict.load(tmp_path / "run", "client-00")
    files = run.adapter("client-00")
    hf = plain(folder, "bert")
    rows = rows_of(6)
    two = {name: w.part(name) for name in (GLOBAL, LOCAL)}
    with torch.no_grad():
        by_hand = torch.stack([logits_by_hand(hf, [(0.5, two[LOCAL]), (0.5, two[GLOBAL])], t) for t in rows.tokens])
        with quiet():
            theirs = PeftModel.from_pretrained(plain(folder, "bert"), str(files)).eval()
        found = torch.cat([theirs(input_ids=t[None]).logits for t in rows.tokens])
        torch.testing.assert_close(found, by_hand, rtol=1e-4, atol=1e-4)
        for name, v in two.items():
            with quiet():
                theirs = PeftModel.from_pretrained(plain(folder, "bert"), str(files / name)).eval()
            found = torch.cat([theirs(input_ids=t[None]).logits for t in rows.tokens])
            by_hand = torch.stack([logits_by_hand(hf, [(1.0, v)], t) for t in rows.tokens])
            torch.testing.assert_close(found, by_hand, rtol=1e-4, atol=1e-4)
    state = run.state(Params)
    assert two[GLOBAL].sha256() == state.sha256()

    (tmp_path / "new.jsonl").write_text((folder / "rows.jsonl").read_text())
    told = predict.predict(tmp_path / "run", tmp_path / "new.jsonl", "client-00")
    from fedfm.data.rows_to_predict import read_inputs

    table = read_inputs(tmp_path / "new.jsonl", run.experiment.data, kind="text")
    expected = predictions.logits(
        FedDPA(local=run.experiment.method.local), model, w, model.prepare(table, range(len(table)))
    )
    np.testing.assert_allclose(told["probabilities"], torch.softmax(expected, 1), atol=1e-6)
    with pytest.raises(InputError, match="client-00 has two adapters"):
        predict.export(tmp_path / "run", "hf", tmp_path / "out", "client-00")


@pytest.mark.proof
def test_instructions_from_run_to_prediction(folder, tmp_path):
    wanted = tables(folder, "fedbip", "llama", 1, instruction=True, local={"weight": "fixed", "lambda": 0.3})
    result = fedfm.run(wanted, tmp_path / "run")
    assert result["loss"] > 0
    _, _, w = predict.load(tmp_path / "run", "x")
    assert dict(w.part(MIX)) == {"bias": torch.tensor(0.3)}
    assert w.part(GLOBAL).sha256() != w.part(LOCAL).sha256()
    assert predict.predict(tmp_path / "run", folder / "asked.jsonl", "x")["perplexity"] > 0


@pytest.mark.proof
def test_a_newcomer_under_fedbip_has_both_adapters(folder, tmp_path):
    fedfm.run(tables(folder, "fedbip"), tmp_path / "run")
    found = join(tmp_path / "run", folder / "rows.jsonl")
    assert 0 <= found["accuracy"] <= 1
    assert set(found["weights"]) == {"newcomer", *fedfm.load_run(tmp_path / "run").manifest["clients"]}
    _, _, w = predict.load(tmp_path / "run", "newcomer")
    assert w.part(LOCAL).sha256() != w.part(GLOBAL).sha256()
    fedfm.run(tables(folder, "feddpa"), tmp_path / "dpa")
    with pytest.raises(InputError, match="no start weights for a client that joins after"):
        join(tmp_path / "dpa", folder / "rows.jsonl")


def test_no_rounds_no_own_adapter(folder, tmp_path):
    fedfm.run(tables(folder, "feddpa", rounds=0), tmp_path / "run")
    _, model, w = predict.load(tmp_path / "run", "client-00")
    assert w.sha256() == model.params().sha256()


@pytest.mark.parametrize(
    ("adaptation", "name"), [("ffa_lora", "feddpa"), ("full", "feddpa"), ("head", "fedbip"), ("ffa_lora", "fedavg")]
)
def test_other_adaptations_are_refused(folder, adaptation, name):
    wrong = tables(folder, name)
    wrong["model"]["adaptation"] = {"name": adaptation}
    with pytest.raises(InputError, match='takes "lora" only'):
        Experiment.from_dict(wrong)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"when": "later"}, "method.local.when"),
        ({"weight": "both"}, "method.local.weight"),
        ({"to": "server"}, "method.local.to"),
        ({"lambda": 1.5}, r"method\.local\.lambda = 1\.5: expected a number in \[0, 1\]"),
        ({"instances": 0}, "method.local.instances = 0"),
        ({"optimiser": "proximal"}, "method.local.optimiser"),
    ],
)
def test_invalid_settings_are_refused(folder, keys, says):
    with pytest.raises(InputError, match=says):
        Experiment.from_dict(tables(folder, "feddpa", local=keys))


def test_models_and_methods_without_two_adapters_are_refused(folder, tmp_path):
    wrong = tables(folder, "fedavg")
    wrong["data"]["path"] = str(pictures(tmp_path, 40))
    wrong["model"] = {"name": str(tiny_vit(tmp_path)), "adaptation": {"name": "lora", "targets": ["projection"]}}
    with pytest.raises(InputError, match="is not a linear map"):
        fedfm.run(wrong, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    model = model_of(folder, "bert")
    DualAdapter().fits(model)
    model.head = None
    model.parts = replace(model.parts, head="")
    DualAdapter(weight="fixed").fits(model)
    with pytest.raises(InputError, match="no last linear layer"):
        DualAdapter().fits(model)
    with pytest.raises(InputError, match=r"method\.local\.name: feddpa takes"):
        Experiment.from_dict(tables(folder, "feddpa") | {"method": {"name": "feddpa", "local": {"name": "proximal"}}})
    for name in ("flora", "fedper"):
        with pytest.raises(InputError, match=r"method\.local\.name"):
            Experiment.from_dict(tables(folder, name))
    assert FedDPA(local=AdamW(0.01, epochs=3)).local == DualAdapter(0.01, 3, optimiser="adamw")
    assert predictions.personal(FedAvg(local=DualAdapter()))
