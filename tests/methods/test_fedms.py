"""FedMS: the specification's figures, a naive loop beside it, and clients that are absent or lose what they keep."""

import dataclasses
import json
import re
import shutil
from collections import deque

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file

import fedfm
from fedfm.api.predict import export, predict
from fedfm.core.client import Client, ClientData
from fedfm.core.rows import Rows
from fedfm.errors import ClientFault, InputError
from fedfm.linalg.params import Params
from fedfm.methods.fedms.activation import next_k, split
from fedfm.methods.fedms.fedms import FedMS
from fedfm.methods.fedms.gate import Gate, initial
from fedfm.methods.fedms.mixture import TRUNK, differing_layers, mix
from fedfm.models.adapters.pair_names import GATE, GLOBAL, LOCAL
from fedfm.models.dual_encoder import image_trunk
from fedfm.models.quiet import quiet
from fedfm.reports.html import write
from fedfm.runtime.population import populate
from fedfm.training import SGD, AdamW
from fedfm.training.scheduler import train_client
from stopping import StopAfter
from tiny_clip import pictures, save

LOCAL_PASS = {"name": "adamw", "learning_rate": 0.01, "batch_size": 16}


@pytest.fixture(scope="module", params=["clip", "vtde"])
def kind(request):
    return request.param


of_one_kind = pytest.mark.parametrize("kind", ["clip"], indirect=True)  # what does not depend on the model's form


@pytest.fixture(scope="module")
def place(kind, tmp_path_factory):
    """A folder with a tiny model of two encoders, and pictures of three classes that differ by their background."""
    path = tmp_path_factory.mktemp(kind)
    save(kind, path / "model")
    pictures(path / "rows.npz")
    return path


def tables(place, run=None, adaptation=None, clients=3, **method):
    return {
        "data": {
            "path": str(place / "rows.npz"),
            "partition": {"name": "dirichlet", "alpha": 0.5, "clients": clients},
        },
        "model": {
            "name": str(place / "model"),
            "task": "zero_shot",
            "adaptation": {"name": "lora", "rank": 2} | (adaptation or {}),
        },
        "method": {"name": "fedms", "global_rounds": 1, "local_rounds": 2, "local": LOCAL_PASS} | method,
        "run": {"seed": 0} | (run or {}),
    }


def run(place, out, progress=None, **more):
    asked = {} if progress is None else {"progress": progress}
    return fedfm.run(fedfm.Experiment.from_dict(tables(place, **more)), out=out, **asked)


@of_one_kind
def test_an_optimiser_without_a_name_is_the_methods_own(place):
    def local(**keys):
        return fedfm.Experiment.from_dict(tables(place, local=keys)).method.local

    assert local(batch_size=8, betas=[0.9, 0.98]) == AdamW(
        learning_rate=2e-4, weight_decay=0.05, decay_of="all", batch_size=8, betas=(0.9, 0.98)
    )
    assert local(name="adamw") == AdamW()
    assert local(name="sgd", momentum=0.5) == SGD(momentum=0.5)


# --- the specification's figures --------------------------------------------------------------------------------------
@pytest.mark.parametrize(("reset", "expected"), [(False, [1, 1, 1, 1, 2, 3, 3, 4]), (True, [1, 1, 1, 1, 2, 2, 2, 3])])
def test_layers_wake_up_as_specified(reset, expected):
    q, k, found = deque(maxlen=3), 1, []
    for a in (0.50, 0.56, 0.60, 0.61, 0.60, 0.61, 0.64, 0.63):
        more = next_k(q, a, k, 0.02, 4)
        if reset and more > k:
            q.clear()
        k = more
        q.append(a)
        found.append(k)
    assert found == expected


@pytest.mark.parametrize(
    ("name", "expected"), [("loss", 2.8), ("inverse_loss", 1.9032), ("size", 3.1), ("uniform", 2.3333)]
)
def test_the_gates_are_averaged_as_specified(name, expected):
    method = FedMS(gate_weights=name)
    a = [method.weight(L, n) for L, n in ((0.2, 10), (0.3, 30), (0.5, 60))]
    assert sum(w * z for w, z in zip(a, (1, 2, 4), strict=True)) / sum(a) == pytest.approx(expected, abs=5e-5)


def test_losses_of_zero_weigh_alike():
    assert len({FedMS().weight(0.0, n) for n in (1, 7)}) == 1


def test_the_mixture_is_of_cosines():
    O = mix(torch.tensor([0.25]), torch.tensor([[0.3, 0.1]]), torch.tensor([[0.2, 0.4]]))  # noqa: E741
    torch.testing.assert_close(O, torch.tensor([[0.225, 0.325]]))
    torch.testing.assert_close((10 * O).softmax(-1), torch.tensor([[0.26894, 0.73106]]), atol=1e-5, rtol=0)
    assert F.cross_entropy(10 * O, torch.tensor([0])).item() == pytest.approx(1.31326, abs=1e-5)


def test_the_gate_is_a_share_of_each_row():
    gate = Gate(6).load(initial(6, 0))
    V = torch.randn(9, 6)
    hidden = F.batch_norm(V @ gate.hidden.weight.T + gate.hidden.bias, None, None, training=True)
    z = F.batch_norm(hidden.relu() @ gate.output.weight.T + gate.output.bias, None, None, training=True)
    torch.testing.assert_close(gate.train()(V), torch.exp(z[:, 0]) / torch.exp(z).sum(1))


# --- against a naive loop ---------------------------------------------------------------------------------------------
def test_a_local_pass_equals_a_loop_that_computes_both_experts_completely(place):
    """Stage two beside plain PyTorch: both experts' whole forward, torch's AdamW, the layers chosen by hand."""
    # Batch norm removes a bias before it: without a larger epsilon, AdamW would divide rounding by rounding there.
    experiment = fedfm.Experiment.from_dict(tables(place, local=LOCAL_PASS | {"epsilon": 1e-4}))
    population = populate(experiment)
    model, method = population.model, experiment.method
    rows = population.data(population.clients[0]).train
    W_g = model.params()
    W_g = W_g.map(lambda x: x + 0.05 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)))
    Z = initial(model.dual.width, 3)
    client = Client("a", ClientData(lambda: rows, type(rows), type(rows)), model, {}, 5, trainer=train_client)
    W_i, Z_i, L_i = method.local_pass(client, W_g, W_g, Z, 2)

    model.load(W_g)
    model.eval_mode()
    with torch.no_grad():
        V_g, T_g = model.dual.images(rows.tensors["pixel_values"]), model.dual.encode_texts()
    top = [path for blocks in model.parts.encoders for path, _ in blocks[-2:]]
    live = {n: p for n, p in model.live().items() if any(f"{t}." in n for t in top)}
    gate = Gate(model.dual.width).load(Z).train()
    both = [torch.optim.AdamW(x, lr=0.01, weight_decay=0.0, eps=1e-4) for x in (live.values(), gate.parameters())]
    from fedfm.training.local_job import Job

    total = seen = 0
    for index in Job(client, W_g, method.local).orders():
        if len(index) < 2:
            continue
        y = rows.labels[index]
        V_i, T_i = model.dual.images(rows.tensors["pixel_values"][index]), model.dual.encode_texts()
        lam = gate(V_g[index])[:, None]
        of_g, of_i = V_g[index] @ T_g.T, V_i @ T_i.T
        L_gate = F.cross_entropy(model.dual.scale * (lam * of_g + (1 - lam) * of_i.detach()), y)
        for o in both:
            o.zero_grad()
        (L_gate + F.cross_entropy(model.dual.scale * of_i, y)).backward()
        for o in both:
            o.step()
        total, seen = total + L_gate.item() * len(index), seen + len(index)
    for name, tensor in model.params().items():
        torch.testing.assert_close(W_i[name], tensor, atol=2e-5, rtol=1e-3, msg=name)
    for name, tensor in gate.tensors().items():
        torch.testing.assert_close(Z_i[name], tensor, atol=2e-5, rtol=1e-3, msg=name)
    assert L_i == pytest.approx(total / seen, rel=1e-4)
    still = [n for n in W_g if n not in live]
    assert still
    assert all(torch.equal(W_i[n], W_g[n]) for n in still)
    assert differing_layers(model, W_g, W_i) == 2


@pytest.mark.proof
def test_caches_kept_over_rounds_do_not_change_the_result(place, monkeypatch):
    """A later round, a first one, and one where nothing fits into files; with a trunk that reads other states."""
    experiment = fedfm.Experiment.from_dict(tables(place, gate="all", adaptation={"dropout": 0.3}))
    W, found = populate(experiment).model.params(), []
    for memory in (None, None, "0"):
        if memory or not found:
            population, method = populate(experiment), experiment.method
        if memory:
            monkeypatch.setenv("FEDFM_MEMORY", memory)
        model, rows = population.model, population.data(population.clients[0]).train
        W_g = W.map(lambda x: x + 0.05 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)))
        Z = Params(dict(initial(model.dual.width, 3)) | {f"{TRUNK}{n}": t for n, t in image_trunk(model).items()})
        client = Client("a", ClientData(lambda rows=rows: rows, Rows, Rows), model, {}, 5, trainer=train_client)
        found.append([method.local_pass(client, W_g, W_g, Z, k)[i].sha256() for k in (1, 2, 3) for i in (0, 1)])
        other = rows.take(range(len(rows))).compute()
        other.tensors["pixel_values"] = other.tensors["pixel_values"].flip(3)
        w = Params.join(**{GLOBAL: W_g, LOCAL: W_g, GATE: Z})
        found[-1].append([method.logits(model, w, r).tolist() for r in (rows, other)])
        assert not torch.equal(*map(torch.tensor, found[-1][-1]))
    assert found[0] == found[1] == found[2]


@pytest.mark.proof
@of_one_kind
def test_the_log_lists_what_stage_two_trained(place, tmp_path, kind):
    run(place, tmp_path / "run", queue=1, threshold=2.0)
    lines = fedfm.load_run(tmp_path / "run").metrics()
    assert ["backward_seconds" in line for line in lines] == [False, False, True, True]
    block = 2 * 2 * (16 + 24)  # rank 2, two maps of each block between 16 and 24 numbers
    gate = 12 * 12 + 12 + 2 * 12 + 2 * 12 + 2 + 2 * 2
    for line, k in zip(lines[2:], (1, 1), strict=True):
        assert line["active_layers"] == k
        assert line["trainable_mean"] == 2 * k * block + gate
        assert line["trainable"] == 3 * line["trainable_mean"]
        assert line["backward_seconds"] > 0
        assert line["deciding_rows"] >= 3
    text = write(tmp_path / "run").read_text()
    assert "Active layers" in text
    assert f"{3 * (2 * block + gate):,}".replace(",", "\u202f") in text


@of_one_kind
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_without_a_gate_one_expert_decides(place, share):
    experiment = fedfm.Experiment.from_dict(tables(place, share=share))
    population = populate(experiment)
    model, rows = population.model, population.test
    W_g, W_i = model.params(), model.params().map(lambda x: x + 0.1)
    w = Params.join(**{GLOBAL: W_g, LOCAL: W_i, GATE: initial(model.dual.width, 0)})
    said = experiment.method.logits(model, w, rows)
    model.load(W_g if share else W_i)
    torch.testing.assert_close(said, model.predict(rows), atol=1e-4, rtol=1e-4)


@pytest.mark.proof
# --- rounds -----------------------------------------------------------------------------------------------------------
@of_one_kind
@pytest.mark.parametrize("gate", ["adapter", "last", "all"])
def test_every_variant_has_the_same_bits_with_one_worker_and_two(place, gate, tmp_path):
    one = run(place, tmp_path / "one", gate=gate, run={"workers": 1})
    two = run(place, tmp_path / "two", gate=gate, run={"workers": 2})
    assert one["params_sha256"] == two["params_sha256"]
    assert one["client_accuracy"] == two["client_accuracy"]


@pytest.mark.proof
def test_the_gate_may_see_a_backbone_of_its_own(place, tmp_path):
    found = run(place, tmp_path / "a", gate_backbone="nano-vit")
    plain = run(place, tmp_path / "b")
    assert found["params_sha256"] != plain["params_sha256"]
    more, less = (r["details"]["trainable_share"]["stage two"] for r in (found, plain))
    assert more > less  # nano-vit's features are wider than the tiny model's
    assert predict(tmp_path / "a", place / "rows.npz", client="client-00")
    with pytest.raises(InputError, match=r"method.gate_backbone.*choose one"):
        run(place, tmp_path / "c", gate_backbone="nano-vit", gate="all")
    with pytest.raises(InputError, match="no-such"):
        run(place, tmp_path / "d", gate_backbone="no-such")


@pytest.mark.proof
@of_one_kind
def test_stage_two_sends_the_gate_and_never_an_expert(place, tmp_path):
    for gate in ("adapter", "last"):
        run(place, tmp_path / gate, gate=gate, local_rounds=3)
    lines = {
        g: [json.loads(x) for x in (tmp_path / g / "messages.jsonl").read_text().splitlines()]
        for g in ("adapter", "last")
    }
    up = {
        g: {c["round"]: c["bytes"] for c in crossings if c["to"] == "server" and c["handler"] == "train.FedMS_adapt"}
        for g, crossings in lines.items()
    }
    d = 12  # of both tiny models
    numbers = {"adapter": d * d + d + 4 * d + 2 * d + 2 + 8, "last": 2 * d + 2 + 8}
    for gate, count in numbers.items():
        assert set(up[gate]) == {2, 3, 4}
        assert all(4 * count <= b <= 4 * count + 1500 for b in up[gate].values())
    down = {
        c["round"]: c["bytes"] for c in lines["last"] if c["from"] == "server" and c["handler"] == "train.FedMS_adapt"
    }
    assert down[2] > 4 * down[3]  # the global expert is sent once


@pytest.mark.proof
@of_one_kind
def test_thresholds_wake_up_all_layers_or_none(place, tmp_path):
    for name, threshold, expected in (("never", -2.0, 1), ("always", 2.0, 3)):
        out = run(place, tmp_path / name, queue=1, threshold=threshold, global_rounds=0, local_rounds=4)
        assert set(out["details"]["active_layers"].values()) == {expected}


@pytest.mark.proof
@of_one_kind
def test_a_queue_that_never_fills_is_a_notice(place, tmp_path):
    run(place, tmp_path / "long", queue=5, local_rounds=2)
    run(place, tmp_path / "short", queue=1, local_rounds=3)
    for name, said in (("long", True), ("short", False)):
        notices = str(json.loads((tmp_path / name / "manifest.json").read_text()).get("notices"))
        assert ("too few to fill the queue" in notices) == said


@of_one_kind
def test_a_client_without_an_expert_says_so_and_starts_from_the_global_one(place):
    experiment = fedfm.Experiment.from_dict(tables(place))
    population, method = populate(experiment), experiment.method
    rows, W_g = population.data(population.clients[0]).train, population.model.params()
    Z = initial(population.model.dual.width, 0)
    client = Client("a", ClientData(lambda: rows, Rows, Rows), population.model, {}, 5, trainer=train_client)
    with pytest.raises(ClientFault, match="lost"):
        method.adapt(client, Z, Params({}))
    method.adapt(client, Z, Params.join(**{GLOBAL: W_g, GATE: Z}))
    assert client.memory["k"] == 1
    assert not torch.equal(*(torch.cat(list(client.memory[w].flats.values())) for w in ("W_i", "W_g")))


@pytest.mark.proof
@of_one_kind
def test_a_lost_expert_is_replaced_and_the_run_says_so(place, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(place, tmp_path / "part", progress=StopAfter(3), local_rounds=4)
    for path in (tmp_path / "part" / "private").rglob("client-00*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(InputError):
        fedfm.resume(tmp_path / "part")
    fedfm.resume(tmp_path / "part", accept_loss=True)
    manifest = json.loads((tmp_path / "part" / "manifest.json").read_text())
    assert "client-00 has lost its local expert" in str(manifest["notices"])


@pytest.mark.proof
@of_one_kind
def test_a_stopped_run_goes_on_to_the_same_bits(place, tmp_path):
    whole = run(place, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(place, tmp_path / "part", progress=StopAfter(2))
    assert fedfm.resume(tmp_path / "part")["params_sha256"] == whole["params_sha256"]


@of_one_kind
def test_few_rows_decide_by_themselves_and_others_hold_a_tenth_out(place):
    population = populate(fedfm.Experiment.from_dict(tables(place)))
    rows = population.data(population.clients[0]).train
    for n, (left, out) in {12: (12, 12), 30: (27, 3)}.items():
        data = ClientData(lambda n=n: rows.take(range(n)), type(rows), type(rows))
        train, deciding = split(Client("a", data, population.model, {}, 0, trainer=train_client))
        assert (len(train), len(deciding)) == (left, out)


@of_one_kind
def test_absent_clients_keep_their_experts(place, tmp_path):
    out = run(place, tmp_path / "some", fraction=0.4, local_rounds=4)
    assert 1 <= len(out["details"]["active_layers"]) <= 3


@pytest.mark.sample("clip")
def test_a_client_model_is_predicted_and_exported(place, tmp_path):
    out = tmp_path / "run"
    line = run(place, out)
    client = sorted(line["client_accuracy"])[0]
    said = predict(out, place / "rows.npz", client=client)
    assert len(said["predictions"]) == 160
    folder = out / "clients" / client / "adapter"
    assert (folder / "gate.safetensors").exists()
    from peft import PeftConfig

    assert {PeftConfig.from_pretrained(folder / e).r for e in (GLOBAL, LOCAL)} == {2}


@pytest.mark.proof
@pytest.mark.parametrize("keys", [{"gate": "adapter"}, {"gate": "all"}, {"share": 0.25}])
def test_the_code_in_an_export_computes_the_mixture(place, tmp_path, keys):
    out = tmp_path / "run"
    client = sorted(run(place, out, queue=1, threshold=1.0, **keys)["client_accuracy"])[0]
    gate = out / "clients" / client / "adapter" / "gate.safetensors"
    drawn = torch.Generator().manual_seed(3)  # a gate of two rounds is nearly constant
    tensors = {n: t + 0.3 * torch.randn(t.shape, generator=drawn).abs() for n, t in load_file(gate).items()}
    save_file(tensors, gate)
    about = json.loads((gate.parent / "fedfm.json").read_text())
    (gate.parent / "fedfm.json").write_text(json.dumps({k: v for k, v in about.items() if k != "sha256"}))
    manifest = json.loads((out / "manifest.json").read_text())
    del manifest["model_files"]  # or the drawn gate would be refused
    (out / "manifest.json").write_text(json.dumps(manifest))
    export(out, "peft", tmp_path / "out", client)
    moved = (tmp_path / "out").rename(tmp_path / "moved")
    code = re.findall(r"```python\n(.*?)```", (moved / "README.md").read_text(), re.DOTALL)[0]
    assert "fedfm" not in code
    names = {}
    with quiet():
        exec(code.replace("FOLDER", str(moved)), names)
    with np.load(place / "rows.npz") as rows:
        read = names["processor"]([Image.fromarray(x) for x in rows["x"][:20]], return_tensors="pt")
    with torch.no_grad():
        found = names["model"](**names["texts"], **read).softmax(1)
        of_global = names["experts"](**names["texts"], **read).logits_per_image.softmax(1)
    said = torch.tensor(predict(out, place / "rows.npz", client=client)["probabilities"][:20])
    torch.testing.assert_close(found, said, atol=2e-5, rtol=0)
    assert (of_global - said).abs().max() > 1e-3  # one expert says something else


def test_a_model_of_one_encoder_is_refused(tmp_path):
    experiment = {
        "data": {"name": "digits", "limit": 60},
        "model": {"name": "nano-vit", "adaptation": {"name": "lora"}},
        "method": {"name": "fedms"},
    }
    with pytest.raises(InputError, match="zero_shot"):
        fedfm.run(fedfm.Experiment.from_dict(experiment), out=tmp_path / "x")


def test_an_optimiser_with_a_model_of_its_own_is_refused():
    from fedfm.training.personal import DittoOptimiser

    with pytest.raises(InputError, match="its own expert"):
        dataclasses.replace(FedMS(), local=DittoOptimiser()).validate()


@of_one_kind
def test_batches_of_one_row_are_refused_where_a_client_of_one_row_is_not(place, tmp_path):
    with pytest.raises(InputError, match="batch_size = 1: the gate's batch norm"):
        dataclasses.replace(FedMS(), local=dataclasses.replace(FedMS().local, batch_size=1)).validate()
    rows = dict(np.load(place / "rows.npz"))
    train = np.flatnonzero(rows["split"] == "train")
    kept = np.isin(np.arange(len(rows["y"])), train, invert=True) | (rows["y"] == rows["y"][train[1]])
    kept[train[0]] = True
    domain = np.where(np.arange(len(kept)) == train[0], "south", "north")  # one row; and rows of one class
    parts = {key: rows[key][kept] for key in ("x", "y", "split")} | {"domain": domain[kept]}
    np.savez(tmp_path / "rows.npz", **parts, classes=rows["classes"])
    given = tables(place, global_rounds=1, local_rounds=1)
    given["data"] = {"path": str(tmp_path / "rows.npz"), "partition": {"name": "by_column", "column": "domain"}}
    result = fedfm.run(given, tmp_path / "run")
    assert result["details"]["deciding_rows"]["south"] == 1
    assert sorted(result["details"]["active_layers"]) == ["north", "south"]
