"""The three stages of a distillation: losses by hand, the swap, and models of several families."""

import copy

import numpy as np
import pytest
import torch
import transformers

from fedfm.encrypted.student import conversion
from fedfm.encrypted.student.distillation_loss import OUTPUTS, STATES, TAME, Distiller, Recipe, nearness
from fedfm.encrypted.student.interval_table import finish
from fedfm.encrypted.student.recalibrate import widen
from fedfm.errors import InputError
from fedfm.models import derived_modules
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec
from tiny_students import full, make_student, tiny
from tiny_text import save_bert


def batch(n=12, size=(8, 8)):
    torch.manual_seed(1)
    return {"pixel_values": torch.randn(n, 3, *size), "labels": torch.arange(n) % 3}


def distiller_of(path, load=full, **recipe):
    teacher, student = load(path), load(path)
    return Distiller(teacher, student, Recipe(**recipe), new_head=bool(teacher.new))


def swapped(distiller, rows, tamed):
    entries = distiller.measure(lambda: [rows])
    tamed.load(distiller.student.model.params())
    distiller.swap(entries, tamed)


def tamed(distiller, rows, steps=120):
    rule = torch.optim.Adam(distiller.student.model.live().values(), 3e-3)
    for _ in range(steps):
        rule.zero_grad()
        distiller.loss(TAME, rows).backward()
        rule.step()


def test_nearness_by_hand():
    s, t = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.0, 2.0], [4.0, 6.0]])
    assert float(nearness(s, t)) == pytest.approx((1 + 0 + 1 + 4) / 4 / np.var([0, 2, 4, 6]))
    assert float(nearness(s, t, each=True)) == pytest.approx(((1 + 1) / 2 / 4 + (0 + 4) / 2 / 4) / 2)


def test_the_tame_loss_by_hand(tmp_path):
    """At the start the student is the teacher: cross-entropy and penalties are left."""
    rows = batch()
    d = distiller_of(tiny("ijepa", tmp_path, head=True), tameness=2.0)
    assert not d.new_head
    got = float(d.loss(TAME, rows).detach())
    seen = []
    with torch.no_grad():
        module = full(tmp_path).module
        for i, layer in enumerate(module.ijepa.layers):
            for name in ("layernorm_before", "layernorm_after", "attention.q_proj", "attention.k_proj", "mlp.fc1"):
                layer.get_submodule(name).register_forward_hook(
                    lambda m, a, y, key=(i, name): seen.append((key, a[0], y))
                )
        logits = module(pixel_values=rows["pixel_values"]).logits
    caught = {key: (a, y) for key, a, y in seen}
    want = torch.nn.functional.cross_entropy(logits, rows["labels"])

    def excess(x):
        return x.clamp_min(0).square().mean()

    total = 0.0
    for i in range(2):
        q, k = (caught[i, f"attention.{n}"][1].reshape(12, 4, 2, 4).transpose(1, 2) for n in ("q_proj", "k_proj"))
        scores = q @ (k - k.mean(2, keepdim=True)).mT / 2
        lse = scores.logsumexp(-1)
        total += excess(3 * ((lse - lse.mean((0, 2), keepdim=True)).abs() - 0.8)) + excess(scores.abs() - 5)
        total += excess(caught[i, "mlp.fc1"][1].abs() - 3.5)
        for name in ("layernorm_before", "layernorm_after"):
            log = (caught[i, name][0].var(-1, correction=0) + 1e-12).log()
            total += excess(3 * ((log - log.mean()).abs() - 0.8))
    assert float(total) > 0.01
    assert got == pytest.approx(float(want + 2 * total), rel=1e-4)


def test_the_outputs_loss_by_hand(tmp_path):
    rows = batch()
    d = distiller_of(tiny("ijepa", tmp_path, head=True), penalty=0.0)
    tamed(d, rows, 60)
    swapped(d, rows, full(tmp_path))
    with torch.no_grad():
        s, t = d.student(rows), d.teacher(rows)
        p, q = (t / 5).softmax(-1), (s / 5).softmax(-1)
        want = 25 * (p * (p / q).log()).sum(-1).mean() - (s.log_softmax(-1)[range(12), rows["labels"]]).mean()
    d.student.model.train_mode()
    assert float(d.loss(OUTPUTS, rows).detach()) == pytest.approx(float(want), rel=1e-3)


def test_a_new_head_keeps_the_features_and_uses_no_labels(tmp_path):
    rows = batch()
    d = distiller_of(tiny("ijepa", tmp_path))
    assert d.new_head
    tamed(d, rows, 40)
    with_labels = float(d.loss(TAME, rows).detach())
    assert float(d.loss(TAME, {"pixel_values": rows["pixel_values"]}).detach()) == with_labels
    head = d.student.model.head
    before = head.weight.detach().clone()
    tamed(d, rows, 2)
    assert torch.equal(head.weight, before)


@pytest.mark.proof
def test_the_states_loss_falls_and_nothing_leaves_its_interval(tmp_path):
    rows = batch(24)
    d = distiller_of(tiny("ijepa", tmp_path))
    tamed(d, rows)
    swapped(d, rows, full(tmp_path))
    student = d.student.model
    rule, losses = torch.optim.Adam(student.live().values(), 1e-3), []
    student.train_mode()
    for _ in range(30):
        rule.zero_grad()
        loss = d.loss(STATES, rows)
        loss.backward()
        rule.step()
        losses.append(float(loss.detach()))
    student.eval_mode()
    assert losses[-1] < 0.7 * losses[0]
    conversion.forget(student.module)
    with torch.no_grad():
        d.student(rows)
    counts = derived_modules.violations(student.module)
    assert sum(outside for outside, _ in counts.values()) == 0
    assert min(total for _, total in counts.values()) > 0


def test_each_block_starts_from_the_tamed_state(tmp_path):
    """By hand: scores and states of every block of the student on the states of the tamed model."""
    rows = batch()
    d = distiller_of(tiny("ijepa", tmp_path), forced=0.5, penalty=0.0)
    tamed(d, rows, 60)
    swapped(d, rows, full(tmp_path))
    with torch.no_grad(), d.tamed.recording():
        d.tamed(rows)
        states = list(d.tamed.states)
        scores = [block.softmax.seen["scores"] for block in d.tamed.functions]
        blocks = [block for _, block in d.student.model.parts.blocks]
        with d.student.recording():
            d.student(rows)
            first = d.student.states[0]
            second = blocks[1](states[0])  # not on what the student's first block gives
            seen = [block.softmax.seen["scores"] for block in d.student.functions]
        second = second - second.mean(-1, keepdim=True)
    pairs = [(seen[0], scores[0]), (seen[1], scores[1]), (first, states[0]), (second, states[1])]
    want = sum(float(nearness(a, b)) for a, b in pairs)
    d.student.model.train_mode()
    assert float(d.loss(STATES, rows, 0.4).detach()) == pytest.approx(want, rel=1e-4)
    free = float(d.loss(STATES, rows, 0.5).detach())
    assert free != pytest.approx(want, rel=1e-4)
    assert free == float(d.loss(STATES, rows).detach())


def narrowed(entries):
    """Intervals that hold half of what they held, so that arguments are outside."""
    found = copy.deepcopy(entries)
    for entry in found:
        for part in (entry["inverse"], *entry["norms"]):
            low, high = part["interval"]
            part["interval"] = [low, low + (high - low) / 4]
    return found


def test_arguments_that_have_moved_get_wider_intervals(tmp_path):
    """By hand for the first norm, whose arguments are the embedding's."""
    rows = batch(24)
    d = distiller_of(tiny("ijepa", tmp_path))
    tamed(d, rows)
    swapped(d, rows, full(tmp_path))
    student, good = d.student.model, copy.deepcopy(d.entries)
    with torch.no_grad(), student.evaluating():
        d.student(rows)
        right = d.student.features.clone()
        d.put(narrowed(good))
        d.student(rows)
        wrong = d.student.features.clone()
    assert not torch.allclose(wrong, right, rtol=0.1)
    found = widen(d.student, d.entries, "scaled", lambda: [rows])
    caught = []
    hook = student.parts.blocks[0][1].register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    with torch.no_grad(), student.evaluating():
        d.student(rows)
    hook.remove()
    variance = caught[0].var(-1, correction=0)
    low, high = float(variance.min()) / 1.3, float(variance.max()) * 1.3
    assert found[0]["norms"][0]["interval"] == pytest.approx([low, high], rel=1e-5)
    assert sum(outside for outside, _ in derived_modules.violations(student.module).values()) == 0
    torch.testing.assert_close(d.student.features, right, rtol=0.02, atol=0.02)
    assert widen(d.student, found, "scaled", lambda: [rows]) == found  # all have room now


def test_arguments_that_spread_too_far_are_refused(tmp_path):
    rows = batch()
    d = distiller_of(tiny("ijepa", tmp_path))
    tamed(d, rows, 60)
    swapped(d, rows, full(tmp_path))
    with torch.no_grad():
        d.student.model.parts.embedding.position_embeddings[:, 0].mul_(300)
    with pytest.raises(InputError, match="block 1, measured again: variances before the attention"):
        widen(d.student, d.entries, "scaled", lambda: [rows])


def test_without_taming_a_wide_model_is_refused(tmp_path):
    d = distiller_of(tiny("ijepa", tmp_path))
    rows = batch()
    rows["pixel_values"][0] = 0.0
    rows["pixel_values"][1] *= 40
    with pytest.raises(InputError, match=r"block 1: variances before the attention .* train longer"):
        d.measure(lambda: [rows])
    assert d.student.functions[0].softmax.exponential is None


@pytest.mark.parametrize("kind", ["vit", "deit"])
def test_class_tokens_get_the_variance_of_patches(tmp_path, kind):
    rows = batch()
    d = distiller_of(tiny(kind, tmp_path))
    embedding = d.student.model.parts.embedding
    d.scale_class_tokens(rows)
    with torch.no_grad():
        variance = embedding(rows["pixel_values"]).var(-1, correction=0).mean(0)
    extra = {"vit": 1, "deit": 2}[kind]
    assert variance[:extra].tolist() == pytest.approx([float(variance[extra:].mean())] * extra, rel=1e-4)


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["vit", "deit"])
def test_a_model_with_class_tokens_is_distilled_and_loads(tmp_path, kind):
    x = make_student(kind, tmp_path)
    model = full(tmp_path)
    assert conversion.is_polynomial_student(model.module)
    with torch.no_grad():
        assert model.logits({"pixel_values": x}).isfinite().all()
        assert conversion.block_states(model.module, x).shape == (32, 2, {"vit": 5, "deit": 6}[kind], 8)


def test_a_bert_is_distilled_and_loads(tmp_path):
    from fedfm.encrypted.student.distillation_loss import save

    start = save_bert(tmp_path / "bert")

    def load(path):
        spec = ModelSpec(str(path), adaptation=AdaptationSpec("full"))
        return load_model(spec, classes=("x", "y"), kind="text")

    d = distiller_of(start, load)
    torch.manual_seed(0)
    ids = torch.randint(5, 20, (8, 6))
    rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(8) % 2}
    rows["attention_mask"][:4, 4:] = 0
    tamed(d, rows, 60)
    swapped(d, rows, load(start))
    d.student.model.train_mode()
    d.loss(STATES, rows).backward()
    d.student.model.eval_mode()
    with torch.no_grad():
        want = d.student(rows)
    good = d.entries
    d.put(narrowed(good))
    d.put(widen(d.student, d.entries, "scaled", lambda: [rows]))
    conversion.forget(d.student.model.module)
    with torch.no_grad():
        torch.testing.assert_close(d.student(rows), want, rtol=0.02, atol=0.02)
    assert sum(outside for outside, _ in derived_modules.violations(d.student.model.module).values()) == 0
    d.put(good)
    finish(d, lambda: [rows], 0.0)
    save(d.student.model, tmp_path / "student", new_head=True)
    again = load(tmp_path / "student")
    assert conversion.is_polynomial_student(again.module)
    with torch.no_grad():
        got = again.module.base_model(input_ids=ids, attention_mask=rows["attention_mask"]).last_hidden_state
    assert got.isfinite().all()
    assert want.isfinite().all()
    with pytest.raises(InputError, match="'bert' cannot run encrypted"):
        conversion.fold(again.module)
    plain = transformers.AutoModel.from_pretrained(tmp_path / "student").eval()
    with torch.no_grad():
        exact = plain(input_ids=ids, attention_mask=rows["attention_mask"]).last_hidden_state
    assert 1e-6 < float((got - exact).abs().max()) < 1


def test_an_odd_degree_is_refused():
    with pytest.raises(InputError, match=r"distil.degree = 3: expected an even number"):
        Recipe(degree=3).validate()
