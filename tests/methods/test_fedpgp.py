"""FedPGP: its loss by hand, its local pass beside plain transformers, and what leaves a client."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fedfm
from fedfm.api.join import join
from fedfm.api.predict import predict
from fedfm.core.client import Client, ClientData
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.methods.fedpgp import FedPGP, contrastive
from fedfm.models.adapter_reading import load_adapter
from fedfm.models.quiet import quiet
from fedfm.runtime.population import populate
from fedfm.training.local_job import Job
from fedfm.training.personal import DittoOptimiser
from fedfm.training.scheduler import train_client
from tiny_clip import pictures, save, tokenizer

M = 4  # context vectors
NAMES = ("fox", "small dog", "bird")
LOCAL = {"name": "adam", "learning_rate": 0.05, "batch_size": 16}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("fedpgp")
    save("clip", path / "model")
    pictures(path / "rows.npz")
    return path


def tables(place, name="fedpgp", data=None, run=None, **method):
    partition = {"path": str(place / "rows.npz"), "partition": {"name": "dirichlet", "alpha": 0.5, "clients": 3}}
    return {
        "data": data or partition,
        "model": {
            "name": str(place / "model"),
            "task": "zero_shot",
            "adaptation": {"name": "prompt", "tokens": M},
            "templates": ["a photo of a {}.", "the {}"],
        },
        "method": {"name": name, "rounds": 2, "local": LOCAL} | method,
        "run": {"seed": 0} | (run or {}),
    }


def test_the_contrastive_loss_is_that_of_the_formula():
    z_G, z_C, z_i = (torch.tensor(z) for z in ([[1.0, 0], [0, 1]], [[0.6, 0.8], [0.8, 0.6]], [[0.8, 0.6], [1, 0]]))
    pairs = [(0.6, 0.8), (0.6, 0.0)]  # (<z_G, z_C>, <z_G, z_i>) of both classes
    right = [-math.log(math.exp(c / 0.5) / (math.exp(c / 0.5) + math.exp(i / 0.5))) for c, i in pairs]
    assert contrastive(z_G, z_C, z_i, 0.5).item() == pytest.approx(sum(right) / 2, rel=1e-6)


class Plain:
    """The text encoder of transformers alone, with vectors in the places of some tokens."""

    def __init__(self, place):
        from transformers import AutoModel

        with quiet():
            self.clip = AutoModel.from_pretrained(place / "model").eval().requires_grad_(False)

    def texts(self, texts, context=None):
        with quiet():
            found = tokenizer()(texts, return_tensors="pt", padding=True)
        words = self.clip.text_model.get_input_embeddings()

        def put(module, args, out):
            return torch.cat([out[:, :1], context.expand(len(out), -1, -1), out[:, 1 + M :]], 1)

        hook = None if context is None else words.register_forward_hook(put)
        z = self.clip.get_text_features(found["input_ids"], attention_mask=found["attention_mask"]).pooler_output
        if hook is not None:
            hook.remove()
        return z / z.norm(dim=-1, keepdim=True)

    def written(self):
        mean = sum(self.texts([t.format(n) for n in NAMES]) for t in ("a photo of a {}.", "the {}")) / 2
        return mean / mean.norm(dim=-1, keepdim=True)

    def images(self, pixels):
        V = self.clip.get_image_features(pixels).pooler_output
        return V / V.norm(dim=-1, keepdim=True)


def test_a_local_pass_is_that_of_a_plain_loop(place):
    population = populate(fedfm.Experiment.from_dict(tables(place, mu=0.7, tau=0.3, rank=2)))
    model, method = population.model, fedfm.Experiment.from_dict(tables(place, mu=0.7, tau=0.3, rank=2)).method
    index = population.federated.clients[population.clients[0]].train
    pixels = model.prepare(population.federated.table, index).tensors["pixel_values"]
    rows = population.data(population.clients[0]).train
    client = Client("a", ClientData(lambda: rows, type(rows), type(rows)), model, {}, 5, trainer=train_client)
    w = model.params()
    low_rank = method.draw_factors(client, w)
    assert {n: tuple(t.shape) for n, t in low_rank.items()} == {"U": (M, 2), "V": (2, 16)}
    w_i, UV = method.local_pass(client, w, low_rank)

    plain = Plain(place)
    p_G, U, V = (t.clone().requires_grad_() for t in (*w.values(), low_rank["U"], low_rank["V"]))
    optimiser = torch.optim.Adam([p_G, U, V], lr=0.05)
    said = [f"{' '.join('X' * M)} {name}." for name in NAMES]
    z_C, images = plain.written(), plain.images(pixels)
    for at in Job(client, w, method.local).orders():
        z_i, z_G = plain.texts(said, p_G + U @ V), plain.texts(said, p_G)
        logits = plain.clip.logit_scale.exp() * images[at] @ z_i.T
        two = torch.stack([F.cosine_similarity(z_G, z_C), F.cosine_similarity(z_G, z_i)], 1) / 0.3  # (C, 2)
        loss = F.cross_entropy(logits, rows.labels[at]) + 0.7 * F.cross_entropy(two, torch.zeros(3, dtype=int))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    torch.testing.assert_close(*w_i.values(), p_G.detach(), atol=2e-4, rtol=1e-3)
    torch.testing.assert_close(UV["U"], U.detach(), atol=2e-4, rtol=1e-3)
    torch.testing.assert_close(UV["V"], V.detach(), atol=2e-4, rtol=1e-3)
    client.memory["low rank"] = UV
    torch.testing.assert_close(*method.own(client, w_i).values(), (p_G + U @ V).detach(), atol=5e-4, rtol=1e-3)


@pytest.mark.proof
@pytest.mark.parametrize("factors", ["of rank 0", "of zeros"])
def test_without_factors_and_contrast_it_is_promptfl(place, tmp_path, monkeypatch, factors):
    """FedAvg of the prompt, in every bit; factors of zeros have gradients of zero."""
    if factors == "of zeros":
        monkeypatch.setattr("fedfm.methods.fedpgp.DEVIATION", 0.0)
    ours = fedfm.run(tables(place, mu=0.0, rank=0 if factors == "of rank 0" else 3), tmp_path / "ours")
    fedfm.run(tables(place, "fedavg"), tmp_path / "theirs")
    theirs = fedfm.load_run(tmp_path / "theirs").state(Params)
    assert ours["rounds"] == 2
    assert torch.equal(*(fedfm.load_run(tmp_path / r).state(Params)["context.weight"] for r in ("ours", "theirs")))
    client = sorted(ours["client_accuracy"])[0]
    model = populate(fedfm.Experiment.from_dict(tables(place))).model
    own = load_adapter(model, tmp_path / "ours/clients" / client / "adapter")
    assert torch.equal(own["context.weight"], theirs["context.weight"])


def test_the_global_prompt_is_the_weighted_mean_of_the_clients(place, tmp_path, monkeypatch):
    seen, plain = [], FedPGP.local_pass

    def watched(self, client, w, low_rank):
        out = plain(self, client, w, low_rank)
        seen.append((len(client.data.train), out[0], low_rank))
        return out

    monkeypatch.setattr(FedPGP, "local_pass", watched)
    fedfm.run(tables(place, rounds=1, run={"workers": 1}), tmp_path / "run")
    assert len(seen) == 3
    mean = sum(n * w["context.weight"] for n, w, _ in seen) / sum(n for n, _, _ in seen)
    torch.testing.assert_close(fedfm.load_run(tmp_path / "run").state(Params)["context.weight"], mean)
    assert not torch.equal(seen[0][2]["U"], seen[1][2]["U"])  # every client draws its own


def test_the_factors_never_travel(place, tmp_path):
    up = {}
    for rank in (1, 16):
        fedfm.run(tables(place, rank=rank, run={"wire": True}), tmp_path / str(rank))
        lines = [json.loads(x) for x in (tmp_path / str(rank) / "messages.jsonl").read_text().splitlines()]
        up[rank] = sorted((c["round"], c["from"], c["to"], c["bytes"]) for c in lines if c["counted"])
    assert up[1] == up[16]
    assert max(line[-1] for line in up[1]) < 4 * M * 16 + 1500


@pytest.mark.proof
def test_clients_that_contradict_each_other_get_models_that_fit_them(place, tmp_path):
    """Two clients name the same pictures differently: no single prompt serves both."""
    rows = dict(np.load(place / "rows.npz"))
    files = {}
    for name, order in (("north", (0, 1, 2)), ("south", (2, 0, 1))):
        files[name] = str(tmp_path / f"{name}.npz")
        np.savez(files[name], **rows | {"y": np.array(order)[rows["y"]]})
    data, keys = {"clients": files}, {"rounds": 12, "local": LOCAL | {"epochs": 2}}
    one = fedfm.run(tables(place, "fedavg", data, **keys), tmp_path / "one")
    own = fedfm.run(tables(place, data=data, mu=0.1, **keys), tmp_path / "own")
    assert own["accuracy"] == own["local_accuracy"]
    assert own["local_accuracy"] > one["local_accuracy"] + 0.1
    assert own["local_accuracy"] > own["details"]["server_accuracy"] + 0.1  # of the global prompt alone
    adapters = [(tmp_path / "own/clients" / c / "adapter/model.safetensors").read_bytes() for c in files]
    assert adapters[0] != adapters[1]


def test_a_client_is_predicted_and_a_newcomer_joins(place, tmp_path):
    line = fedfm.run(tables(place), tmp_path / "run")
    client = sorted(line["client_accuracy"])[0]
    assert len(predict(tmp_path / "run", place / "rows.npz", client=client)["predictions"]) == 160
    joined = join(tmp_path / "run", place / "rows.npz")
    assert 0 <= joined["accuracy"] <= 1
    assert joined["weights"] == {}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"adaptation": {"name": "lora"}}, r'model\.adaptation\.name = "lora": .* takes .*prompt'),
        ({"templates": ["a " * 130 + "{}."]}, r"model\.templates"),
    ],
)
def test_unsuitable_models_and_templates_are_refused(place, tmp_path, keys, message):
    wrong = tables(place)
    wrong["model"] |= keys
    with pytest.raises(InputError, match=message):
        fedfm.run(wrong, tmp_path / "run")
    with pytest.raises(InputError, match="its own model"):
        FedPGP(local=DittoOptimiser()).validate()
