"""Two adapters on one frozen base, layer by layer, against weights W + sum m s B A of a plain model and autograd."""

import copy
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_models import CLASSES, images, load
from torch import nn
from torch.func import functional_call

from fedfm.core import tasks
from fedfm.core.client import Client, ClientData
from fedfm.core.rows import Rows
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.models import families
from fedfm.models.adapters import adaptation, lora
from fedfm.models.adapters.experts import Expert, experts
from fedfm.models.layers import layers
from fedfm.models.model import Model
from fedfm.models.preprocessors import Tools
from fedfm.models.quiet import quiet
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.training import SGD, AdamW
from fedfm.training.local_job import Job
from fedfm.training.scheduler import train_client

ALPHA, PEFT = 8.0, "base_model.model."
SIZES = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}


class Matching(nn.Module):
    """Does the text belong to the picture? Logits: the scaled cosine of CLIP's two features, and 0."""

    base_model_prefix = "clip"

    def __init__(self, clip):
        super().__init__()
        self.clip = clip

    def forward(self, pixel_values, input_ids, attention_mask):
        text = self.clip.get_text_features(input_ids=input_ids, attention_mask=attention_mask).pooler_output
        image = self.clip.get_image_features(pixel_values=pixel_values).pooler_output
        cosine = F.cosine_similarity(image, text)
        return torch.stack([5 * cosine, torch.zeros_like(cosine)], 1)  # (b, 2)


@dataclass
class Case:
    model: Model
    plain: nn.Module  # the same model before LoRA, frozen
    rows: Rows

    def logits(self, terms, index):
        """Logits of the plain model with the weights W + sum m (alpha / r) B A, and with the head sum m head."""
        weights = {name: p.detach() for name, p in self.plain.named_parameters()}
        heads = {}
        for m, w, where in terms:
            for name, tensor in w.items():
                path = name.removeprefix(PEFT)
                if ".lora_A." in path:
                    module = path.partition(".lora_A.")[0]
                    if where is None or any(module.startswith(f"{layer}.") for layer in where):
                        up = w[name.replace("lora_A", "lora_B")]
                        key = f"{module}.weight"
                        weights[key] = weights[key] + m * ALPHA / len(tensor) * up @ tensor
                elif ".modules_to_save." in path:
                    key = path.replace(".modules_to_save.default", "")
                    heads[key] = heads.get(key, 0.0) + m * tensor
        batch = self.rows.batch(index)
        labels = batch.pop("labels")
        out = functional_call(self.plain, weights | heads, kwargs=batch)
        return (out if isinstance(out, torch.Tensor) else out.logits), labels


def tiny_clip(seed=7):
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vision = {**SIZES, "num_hidden_layers": 3, "image_size": 16, "patch_size": 8}
        text = {**SIZES, "num_hidden_layers": 2, "vocab_size": 32, "max_position_embeddings": 12}
        ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        return transformers.CLIPModel(
            transformers.CLIPConfig(vision_config=vision, text_config={**text, **ends}, projection_dim=12)
        )


def matching(clip=None, **changes):
    """A CLIP model with LoRA in both encoders, made of the parts that load_model is made of."""
    module = Matching(clip or tiny_clip()).requires_grad_(False)
    plain = copy.deepcopy(module).eval()
    keys = {"rank": 2, "alpha": ALPHA, "targets": ("fc1", "fc2"), **changes}
    spec = adaptation.with_defaults(AdaptationSpec("lora", **keys))
    parts = families.find(module, "clip")
    adapted = adaptation.apply(module, spec, parts, new=[], task=tasks.find("classification"), seed=0)
    model = Model(
        adapted,
        spec=ModelSpec("clip", task="classification", adaptation=spec),
        task=tasks.find("classification"),
        classes=("yes", "no"),
        parts=parts,
        tools=Tools(),
        fingerprint="",
        head=None,
    )
    return model, plain


def pictures_and_texts(n=24):
    rng = np.random.default_rng(0)
    texts = tuple(torch.tensor([1, *rng.integers(3, 32, rng.integers(1, 8)), 2]) for _ in range(n))
    pixels = torch.from_numpy(rng.normal(size=(n, 3, 16, 16)).astype(np.float32))
    return Rows({"pixel_values": pixels}, tokens=texts, labels=torch.from_numpy(rng.integers(0, 2, n)))


def case_of(kind, folder, dropout=0.0):
    if kind == "clip":
        model, plain = matching(dropout=dropout)
        return Case(model, plain, pictures_and_texts())
    from transformers import ViTForImageClassification

    model = load(folder("vit"), images(24), AdaptationSpec("lora", rank=2, alpha=ALPHA, dropout=dropout))
    with quiet():
        plain = ViTForImageClassification.from_pretrained(folder("vit"), num_labels=len(CLASSES)).eval()
    return Case(model, plain.requires_grad_(False), model.prepare(images(24), range(24)))


def top(model, k):
    return [path for encoder in model.parts.encoders for path, _ in encoder[-k:]]


def noisy(model, seed, rank=2):
    """An adapter of any rank, none of whose tensors is zero."""
    generator = torch.Generator().manual_seed(seed)
    layout = lora.layout_at(model.layout, rank)
    return Params({n: 0.3 * torch.randn(shape, generator=generator) for n, _, shape in layout.entries})


def client_of(case, seed=3):
    return Client(
        "k",
        ClientData(lambda: case.rows, lambda: case.rows, lambda: case.rows),
        case.model,
        {},
        seed=seed,
        trainer=train_client,
    )


def predicted(case, terms):
    with torch.no_grad():
        return case.logits(terms, range(len(case.rows)))[0]


@pytest.fixture(params=["vit", "clip"])
def case(request, folder):
    return case_of(request.param, folder)


def test_weights_and_switches_by_layer(case):
    model = case.model
    g, v = noisy(model, 1, rank=3), noisy(model, 2)
    model.load(v)
    high, low = top(model, 1), [path for encoder in model.parts.encoders for path, _ in encoder[:1]]
    found = {}
    for name, adapters, terms in (
        ("both", {"global": Expert(g, 0.7), "local": Expert(weight=0.4)}, [(0.7, g, None), (0.4, v, None)]),
        (
            "by layer",
            {"global": Expert(g, 0.7, layers=low), "local": Expert(weight=0.4, layers=high)},
            [(0.7, g, low), (0.4, v, high)],
        ),
        ("global alone", {"global": Expert(g)}, [(1.0, g, None)]),
        ("local alone", {"local": Expert(layers=high)}, [(1.0, v, high)]),
        ("neither", {"global": Expert(g, layers=()), "local": Expert(weight=0.0, layers=())}, [(1.0, g, ())]),
    ):
        with experts(model, adapters):
            found[name] = model.predict(case.rows)
        torch.testing.assert_close(found[name], predicted(case, terms), rtol=1e-4, atol=1e-4)
    assert min((a - b).abs().max() for i, a in enumerate(found.values()) for b in list(found.values())[:i]) > 1e-3


def test_a_weight_may_differ_by_row(case):
    model = case.model
    g, v = noisy(model, 1), noisy(model, 2)
    model.load(v)
    a = torch.linspace(0, 1, 5)

    def own(y):
        return a.view(-1, *[1] * (y.dim() - 1))

    with experts(model, {"global": Expert(g, lambda y: 1 - own(y)), "local": Expert(weight=own)}), torch.no_grad():
        found = model.logits(case.rows.batch(range(5)))
    for i, share in enumerate(a.tolist()):
        with torch.no_grad():
            expected, _ = case.logits([(1 - share, g, None), (share, v, None)], [i])
        torch.testing.assert_close(found[i], expected[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rule", ["sgd", "adamw"])
def test_the_trained_layers_of_one_expert_move_and_nothing_else(case, rule):
    """Autograd through the plain model's weights, torch's own optimiser; weight decay would move frozen tensors."""
    model = case.model
    g, v = noisy(model, 1), noisy(model, 2)
    upper, on = top(model, 1), top(model, 2)
    bits, eta, decay = g.sha256(), 0.05 if rule == "sgd" else 0.01, 0.1
    local = (SGD if rule == "sgd" else AdamW)(eta, epochs=2, batch_size=8, weight_decay=decay, decay_of="all")
    client = client_of(case)
    local(client_of(case), g)  # whatever the model has trained before
    with experts(model, {"global": Expert(g, 0.6), "local": Expert(weight=0.5, layers=on, trained=upper)}):
        found = local(client, v)

    moves = [
        n for n in v if ".modules_to_save." in n or any(n.startswith(f"{PEFT}{layer}.") for layer in upper)
    ]  # fmt: skip
    live = {n: t.clone().requires_grad_(n in moves) for n, t in v.items()}
    rates = {"lr": eta, "weight_decay": decay}
    moving = [live[n] for n in moves]
    optimiser = torch.optim.SGD(moving, **rates) if rule == "sgd" else torch.optim.AdamW(moving, **rates)
    for index in Job(client, v, local).orders():
        logits, labels = case.logits([(0.6, g, None), (0.5, live, on)], index)
        optimiser.zero_grad()
        F.cross_entropy(logits, labels).backward()
        optimiser.step()
    expected = Params(live)
    assert 0 < len(moves) < len(v)
    assert (expected - v).norm() > 0.01
    assert (found - expected).norm() / (expected - v).norm() < (1e-4 if rule == "sgd" else 5e-3)
    assert [n for n in v if not torch.equal(found[n], v[n])] == moves
    assert g.sha256() == bits


def test_below_the_lowest_trained_layer_nothing_is_in_the_graph(case):
    model, seen = case.model, {}
    g = noisy(model, 1)
    hooks = [
        block.register_forward_hook(
            lambda _, args, y, path=path: seen.update({path: (y[0] if isinstance(y, tuple) else y).requires_grad})
        )
        for encoder in model.parts.encoders
        for path, block in encoder
    ]
    trained = top(model, 2)
    with experts(model, {"global": Expert(g, 0.5), "local": Expert(weight=0.5, trained=trained)}):
        model.loss(case.rows.batch(range(8))).backward()
    graded = {n for n, t in model.live().items() if t.grad is not None}
    assert {path for path, is_in in seen.items() if is_in} == set(trained)
    assert graded == {
        n for n in model.names if ".modules_to_save." in n or any(n.startswith(f"{PEFT}{p}.") for p in trained)
    }
    model.loss(case.rows.batch(range(8))).backward()  # without the experts all of them have one
    assert all(seen.values())
    assert all(t.grad is not None for t in model.live().values())
    for hook in hooks:
        hook.remove()


def test_the_global_expert_alone_trains_nothing(case):
    model = case.model
    with experts(model, {"global": Expert(noisy(model, 1))}):
        assert not model.logits(case.rows.batch(range(4))).requires_grad
        assert model.live() == {}


@pytest.mark.parametrize("kind", ["vit", "clip"])
def test_dropout_meets_trained_layers_only(folder, kind):
    """Under dropout two passes differ; where no layer is trained they do not."""
    case = case_of(kind, folder, dropout=0.5)
    model = case.model
    model.load(noisy(model, 2))
    batch = case.rows.batch(range(8))
    for trained, same in ((None, False), (top(model, 1), False), ((), True)):
        with experts(model, {"local": Expert(trained=trained)}), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model.train_mode()
            first, second = model.logits(batch), model.logits(batch)
            model.eval_mode()
        assert torch.equal(first, second) == same


def test_afterwards_the_model_is_as_before(case):
    model = case.model
    v = noisy(model, 2)
    model.load(v)

    def state():
        flags = {n: p.requires_grad for n, p in model.module.named_parameters()}
        hooks = sum(len(m._forward_hooks) for m in model.module.modules())
        return flags, hooks, list(model.live()), model.params().sha256(), model.weights_overridden

    before, logits = state(), model.predict(case.rows)
    adapters = {"global": Expert(noisy(model, 1), 0.3), "local": Expert(weight=0.7, layers=top(model, 2), trained=())}
    with experts(model, adapters):
        assert not torch.equal(model.predict(case.rows), logits)
    assert state() == before
    assert torch.equal(model.predict(case.rows), logits)
    with pytest.raises(RuntimeError, match="inside"), experts(model, adapters):
        raise RuntimeError("inside")
    assert state() == before
    # and trains all of it again, as a model that never had experts
    trained = SGD(0.05, batch_size=8)(client_of(case), v)
    assert all(not torch.equal(trained[n], v[n]) for n in v)


def test_mismatched_experts_are_refused_before_anything_changes(case):
    model = case.model
    g = noisy(model, 1)
    for adapters, error, says in (
        ({"global": Expert(Params({"w": torch.zeros(1)}))}, KeyError, "parameter names differ"),
        ({"global": Expert(), "local": Expert()}, ValueError, "two experts"),
        ({"global": Expert(g, layers=["layer.99"])}, AttributeError, "layer"),
    ):
        with pytest.raises(error, match=says), experts(model, adapters):
            pass
        assert model.weights_overridden == 0


def test_only_lora_on_linear_maps_has_experts(folder):
    with pytest.raises(InputError, match="expected"), experts(load(folder("vit"), images(), "head"), {}):
        pass


# --- two encoders -----------------------------------------------------------------------------------------------------


def test_layers_are_numbered_by_encoder():
    model, _ = matching()
    image, text = model.parts.encoders
    assert [path for path, _ in image] == [f"clip.vision_model.encoder.layers.{i}" for i in range(3)]
    assert [path for path, _ in text] == [f"clip.text_model.encoder.layers.{i}" for i in range(2)]
    assert model.parts.head == ""  # neither projection is a classifier
    adapted = {path.removeprefix(PEFT) for path in lora.pairs(model.names)}
    assert adapted == {f"{path}.mlp.{fc}" for path, _ in (*image, *text) for fc in ("fc1", "fc2")}
    assert list(layers(model, "layer")) == [path for path, _ in (*text, *image)]


def test_a_dual_encoder_of_two_models(folder):
    import transformers as t

    with quiet():
        vision = t.ViTModel(t.ViTConfig(**SIZES, num_hidden_layers=3, image_size=16, patch_size=8))
        text = t.BertModel(t.BertConfig(**SIZES, num_hidden_layers=2, vocab_size=32))
        both = t.VisionTextDualEncoderModel(vision_model=vision, text_model=text)
    parts = families.find(both, both.config.model_type)
    assert [path for path, _ in parts.blocks] == [f"vision_model.layers.{i}" for i in range(3)]
    assert [path for path, _ in parts.text_blocks] == [f"text_model.encoder.layer.{i}" for i in range(2)]
    assert parts.head == ""


def test_the_last_layers_of_both_encoders():
    """``layers`` counts from the top of each; the shallower one has all of its own."""
    for k, expected in ((1, 2), (2, 4), (3, 5)):
        model, _ = matching(layers=k)
        owners = {path.removeprefix(PEFT).rpartition(".mlp.")[0] for path in lora.pairs(model.names)}
        assert owners == set(top(model, k))
        assert len(owners) == expected
    with pytest.raises(InputError, match="4, but the model has 3 blocks"):
        matching(layers=4)


def test_rows_carry_pictures_and_texts():
    rows = pictures_and_texts()
    part = rows.take([5, 2])
    batch = part.batch([0, 1])
    assert set(batch) == {"pixel_values", "input_ids", "attention_mask", "labels"}
    assert torch.equal(batch["pixel_values"], rows.tensors["pixel_values"][[5, 2]])
    lengths = [len(rows.tokens[i]) for i in (5, 2)]
    assert batch["attention_mask"].sum(1).tolist() == lengths
    assert batch["input_ids"][0, : lengths[0]].tolist() == rows.tokens[5].tolist()
    # rows are sorted by the lengths of their texts to be predicted, and come back in their order
    model, plain = matching()
    with torch.no_grad():
        expected = torch.cat(
            [plain(**{k: v for k, v in rows.batch([i]).items() if k != "labels"}) for i in range(len(rows))]
        )
    torch.testing.assert_close(model.predict(rows), expected, rtol=1e-4, atol=1e-4)
