"""LoRA by hand against the loop: same batches, same optimisers, same results within rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DeiTConfig,
    DeiTForImageClassification,
    IJepaConfig,
    IJepaForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from fedfm.core import tasks
from fedfm.core.client import Client, ClientData, Terms
from fedfm.core.rows import Rows
from fedfm.linalg.params import Params
from fedfm.models import families
from fedfm.models.adapters import adaptation
from fedfm.models.model import Model
from fedfm.models.preprocessors import Tools
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.training import SGD, Adam, AdamW, Local, loop, packed, scheduler
from fedfm.training.local_job import Job
from fedfm.training.packed import linear, net, prefix
from fedfm.training.scheduler import train_client

CLASSES = 5
COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "num_labels": CLASSES,
    "initializer_range": 0.2,  # so that attention is far from uniform and a slip shows
}
IMAGE: dict[str, Any] = {**COMMON, "image_size": 12, "patch_size": 4}
FAMILIES = ("bert", "vit", "deit", "ijepa")


def make(family: str, **options: Any) -> Model:
    """A random tiny model of this family, its LoRA away from zero."""
    torch.manual_seed(0)
    act = options.pop("hidden_act", "gelu")
    module: Any = {
        "bert": lambda: BertForSequenceClassification(
            BertConfig(vocab_size=50, max_position_embeddings=40, hidden_act=act, **COMMON)
        ),
        "vit": lambda: ViTForImageClassification(ViTConfig(hidden_act=act, **IMAGE)),
        "deit": lambda: DeiTForImageClassification(DeiTConfig(hidden_act=act, **IMAGE)),
        "ijepa": lambda: IJepaForImageClassification(IJepaConfig(hidden_act=act, **IMAGE)),
    }[family]()
    with torch.no_grad():
        for name, p in module.named_parameters():
            if p.dim() == 1:  # norms and biases too must matter
                p.add_(0.1 * torch.randn(p.shape))
            elif "classifier" in name:
                p.copy_(0.2 * torch.randn(p.shape))
    options.setdefault("name", "lora")
    spec = adaptation.with_defaults(AdaptationSpec(**options))
    parts = families.find(module, family)
    module = adaptation.apply(module, spec, parts, new=["classifier"], task=tasks.find("classification"), seed=0)
    model = Model(
        module,
        spec=ModelSpec(family, adaptation=spec),
        task=tasks.find("classification"),
        classes=[str(i) for i in range(CLASSES)],
        parts=parts,
        tools=Tools(),
        fingerprint="",
        head=None,
    )
    model.predictor = packed.predict
    return model


def start_of(model: Model) -> Params:
    generator = torch.Generator().manual_seed(1)
    return model.params().map(lambda t: t + 0.1 * torch.randn(t.shape, generator=generator))


def rows_of(family: str, n: int, rng: np.random.Generator) -> Rows:
    labels = torch.from_numpy(rng.integers(0, CLASSES, n))
    if family == "bert":
        tokens = tuple(torch.from_numpy(rng.integers(1, 50, rng.integers(1, 36))) for _ in range(n))
        return Rows(tokens=tokens, labels=labels)
    pixels = torch.from_numpy(rng.standard_normal((n, 3, 12, 12), dtype=np.float32))
    return Rows({"pixel_values": pixels}, labels=labels)


def jobs_of(model: Model, family: str, local: Local, sizes: tuple[int, ...] = (9, 4, 1, 14), **extra: Any) -> list[Job]:
    rng = np.random.default_rng(len(sizes))
    w = start_of(model)
    jobs = []
    for k, n in enumerate(sizes):
        rows = rows_of(family, n, rng)
        data = ClientData(lambda rows=rows: rows, lambda: Rows(), lambda: Rows())
        jobs.append(Job(Client(str(k), data, model, {}, seed=k, trainer=train_client), w, local, **extra))
    return jobs


def both(jobs: list[Job], kernels: str) -> tuple[float, float]:
    """Largest relative L2 distance and largest difference of the losses between the loop and ours."""
    model = jobs[0].client.model
    model.kernels = kernels
    assert packed.applies(model, kernels)
    expected = loop.train(jobs)
    losses = [job.client.metrics.pop("loss") for job in jobs]
    found = packed.train(jobs)
    assert all(tuple(a) == tuple(b) for a, b in zip(expected, found, strict=True))
    moved = min((a - job.w).norm() / a.norm() for a, job in zip(expected, jobs, strict=True))
    assert moved > 1e-4  # there is something to agree on
    distance = max((a - b).norm() / a.norm() for a, b in zip(expected, found, strict=True))
    return distance, max(abs(job.client.metrics["loss"] - loss) for job, loss in zip(jobs, losses, strict=True))


OPTIMISERS = {
    "sgd": (SGD(0.1, epochs=2, batch_size=4), 1e-5),
    "momentum": (SGD(0.05, epochs=2, batch_size=4, momentum=0.9, weight_decay=0.01), 1e-5),
    "adam": (Adam(0.003, batch_size=3, weight_decay=0.01), 5e-5),
    "adamw": (AdamW(0.003, epochs=2, batch_size=4, weight_decay=0.1), 5e-5),
}


@pytest.mark.each_value
@pytest.mark.parametrize("kernels", ["exact", "fast"])
@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_training_equals_the_loop(family: str, optimiser: str, kernels: str) -> None:
    local, tolerance = OPTIMISERS[optimiser]
    distance, loss = both(jobs_of(make(family), family, local), kernels)
    assert distance < tolerance
    assert loss < 1e-5


@pytest.mark.parametrize("family", ["bert", "ijepa"])
def test_proximal_term_and_correction(family: str) -> None:
    model = make(family)
    correction = start_of(model).map(lambda t: 0.05 * torch.ones_like(t))
    jobs = jobs_of(model, family, SGD(0.1, epochs=3, batch_size=4), terms=Terms(0.5, correction))
    assert both(jobs, "fast")[0] < 1e-5
    plain = packed.train([Job(j.client, j.w, j.local) for j in jobs])
    assert (plain[0] - packed.train(jobs)[0]).norm() > 1e-3


@pytest.mark.parametrize(
    "options",
    [
        {"name": "ffa_lora"},
        {"layers": 1},
        {"layers": 2, "rank": 3, "alpha": 5.0},
        {"targets": ("query", "key", "value")},
        {"targets": ("key",)},
        {"targets": ("attention.output.dense", "intermediate.dense", "value")},
        {"targets": ("intermediate.dense",), "layers": 2},
    ],
    ids=str,
)
def test_every_adapter_of_bert(options: dict[str, Any]) -> None:
    assert both(jobs_of(make("bert", **options), "bert", SGD(0.1, epochs=2, batch_size=4)), "fast")[0] < 1e-5


@pytest.mark.each_value
@pytest.mark.parametrize("targets", [("k_proj", "o_proj"), ("q_proj", "fc1", "fc2"), ("fc2",)], ids=str)
@pytest.mark.parametrize("family", ["vit", "ijepa"])
def test_every_adapter_of_pictures(family: str, targets: tuple[str, ...]) -> None:
    model = make(family, targets=targets)
    assert both(jobs_of(model, family, SGD(0.1, epochs=2, batch_size=4)), "exact")[0] < 1e-5


@pytest.mark.parametrize("seed", range(6))
def test_random_cohorts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    family = FAMILIES[seed % len(FAMILIES)]
    local = SGD(0.1, epochs=int(rng.integers(1, 4)), batch_size=int(rng.integers(1, 7)))
    sizes = tuple(int(n) for n in rng.integers(1, 20, rng.integers(1, 6)))
    model = make(family, rank=int(rng.integers(1, 9)), layers=int(rng.integers(1, 4)))
    distance, loss = both(jobs_of(model, family, local, sizes), "fast")
    assert distance < 1e-5
    assert loss < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_depends_on_nobody_else(family: str) -> None:
    model = make(family)
    jobs = jobs_of(model, family, AdamW(batch_size=4))
    together = packed.train(jobs)
    model.module.float()
    packed._known.clear()  # another process would start from nothing
    alone = [packed.train([job])[0] for job in reversed(jobs)][::-1]
    assert [w.sha256() for w in together] == [w.sha256() for w in alone]


@pytest.mark.parametrize("family", ["bert", "ijepa"])
def test_bfloat16(family: str) -> None:
    distance, loss = both(jobs_of(make(family), family, SGD(0.02, batch_size=4)), "fast_bf16")
    assert 1e-6 < distance < 5e-3  # it does multiply in bfloat16
    assert loss < 0.05


def test_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_pointwise", lambda: None)
    assert both(jobs_of(make("bert"), "bert", SGD(0.1, batch_size=4)), "fast")[0] < 1e-5


@pytest.mark.parametrize("family", ["bert", "vit"])
def test_the_frozen_prefix_is_computed_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(family, layers=1)
    jobs = jobs_of(model, family, SGD(0.1, epochs=3, batch_size=4))
    seen = []
    found = packed._net(model, False)
    assert found is not None
    handle = found.net.embed.register_forward_hook(lambda *_: seen.append(1))
    first = packed.train(jobs)
    assert len(seen) == len(jobs)
    second = packed.train(jobs)
    assert len(seen) == len(jobs)
    assert [w.sha256() for w in first] == [w.sha256() for w in second]
    monkeypatch.setattr(prefix, "CAP", 0)  # too large to keep: batch by batch
    packed._known.clear()
    third = packed.train(jobs)
    handle.remove()
    assert len(seen) > 2 * len(jobs)
    assert max((a - b).norm() / a.norm() for a, b in zip(first, third, strict=True)) < 1e-5


def test_the_cache_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("ijepa")
    jobs = jobs_of(model, "ijepa", SGD(batch_size=4), sizes=(4,) * 8)
    found = packed._net(model, False)
    assert found is not None
    each = 4 * 9 * 32 * 4
    monkeypatch.setattr(prefix, "CAP", 5 * each)
    packed.train(jobs)
    assert len(found.cache) == 5
    del jobs
    assert len(found.cache) == 0


def test_changed_frozen_weights_are_read_again() -> None:
    model = make("vit")
    jobs = jobs_of(model, "vit", SGD(0.1, batch_size=4))
    before = packed.train(jobs)
    for name, p in model.module.named_parameters():
        if "q_proj.base_layer.weight" in name:
            p.data += 0.3 * torch.randn(p.shape)  # as a merge of adapters does
    assert both(jobs, "exact")[0] < 1e-5
    assert (before[0] - packed.train(jobs)[0]).norm() / before[0].norm() > 1e-4


def test_rows_of_another_kind_go_through_the_loop() -> None:
    model = make("bert")
    jobs = jobs_of(model, "bert", SGD(0.1, batch_size=4), sizes=(6, 5))
    ids = torch.randint(1, 50, (6, 8))
    rows = Rows({"input_ids": ids, "token_type_ids": torch.ones_like(ids)}, labels=torch.arange(6) % CLASSES)
    jobs[0].client.data = ClientData(lambda: rows, lambda: Rows(), lambda: Rows())
    assert both(jobs, "fast")[0] < 1e-5


@pytest.mark.parametrize(
    "options",
    [
        {"dropout": 0.1},
        {"name": "head"},
        {"name": "full"},
        {"hidden_act": "relu"},
        {"targets": ("dense", "query")},  # BERT's pooler has a LoRA, too
    ],
    ids=str,
)
def test_unsupported_models_are_trained_by_the_general_loop(options: dict[str, Any]) -> None:
    model = make("bert", **options)
    assert not packed.applies(model, "fast")
    assert scheduler.trainer_for(model) is loop.train
    assert scheduler.width(model) == 1


def test_half_precision_and_unknown_kernels_are_refused() -> None:
    model = make("vit")
    assert not packed.applies(model, "no such kernels")
    model.module.half()
    with pytest.raises(net.Unsupported, match="half"):
        net.read(model, low=False)


def test_chosen_by_the_model_alone() -> None:
    model = make("bert")
    assert scheduler.trainer_for(model) is packed.train
    assert scheduler.width(model) == 1
    model.kernels = "fast"  # type: ignore[attr-defined]
    assert scheduler.trainer_for(model) is packed.train
    assert scheduler.width(model) > 1


def test_a_model_with_another_loss_is_left_to_the_loop() -> None:
    """Kernels by hand compute softmax cross-entropy; a wrapped PEFT module may have any loss of its own."""
    from fedfm.models.wrap import wrap

    module = make("bert").module
    mine = wrap(module, lambda m, batch: m(**batch).logits.square().mean(), classes=("a", "b"))
    assert not packed.applies(mine, "exact")
    assert scheduler.trainer_for(mine) is loop.train
