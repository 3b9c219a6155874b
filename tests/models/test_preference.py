"""Direct preference optimisation against a naive loop over tokens, and against the formula by hand.

The naive loop takes one text at a time, without padding, and the reference from PEFT's own ``disable_adapter``.
"""

import math

import numpy as np
import pytest
import torch
from tiny_models import load

from fedfm.core.client import Client, ClientData
from fedfm.data.table import Table
from fedfm.errors import InputError
from fedfm.models.adapters.experts import Expert, experts
from fedfm.models.adapters.lora import shift_weights
from fedfm.models.language import next_token
from fedfm.models.multiply_accumulates import per_sample
from fedfm.models.spec import AdaptationSpec
from fedfm.tasks.preference import REFERENCE
from fedfm.training import SGD, loop, row_gradients
from fedfm.training.local_job import Job
from fedfm.training.scheduler import train_client

TRIPLES = [
    ("the quick fox", "jumps over a dog", "sing"),
    ("a", "birds", "the lazy brown dog"),
    ("seven small birds", "sing while a fox jumps", "over the dog"),
    ("the dog", "jumps", "jumps over"),
    ("quick", "a", "b"),
]
BETA = 0.3
LORA = AdaptationSpec("lora", rank=2)


def table(triples=TRIPLES):
    return Table("preference", list(triples), None, (), np.full(len(triples), "train"))


def model_of(folder, adaptation=LORA, scale=0.4, **spec):
    model = load(folder("llama"), table(), adaptation, **{"beta": BETA, "template": "plain", **spec})
    with torch.no_grad():
        torch.manual_seed(5)
        for p in model.live().values():  # B starts at zero, where the model is its reference
            p.add_(scale * torch.randn(p.shape))
    return model


def log_probability(model, asked, answer):
    """log pi(y | x), token by token."""
    tokenizer = model.tools.tokenizer
    prompt = tokenizer(f"{asked}\n")["input_ids"]
    ids = prompt + tokenizer(answer, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    z = torch.log_softmax(model.module(input_ids=torch.tensor([ids])).logits[0].double(), -1)
    return sum(z[i - 1, ids[i]] for i in range(len(prompt), len(ids)))


def naive(model, triples=TRIPLES):
    """Margins beta (log pi(y_w) - log ref(y_w) - log pi(y_l) + log ref(y_l)), one row at a time."""
    margins = []
    for asked, *answers in triples:
        policy = [log_probability(model, asked, a) for a in answers]
        # Switching PEFT's adapters off and on trains A again, which ffa_lora keeps as it is: the last thing here.
        with torch.no_grad(), model.module.disable_adapter():
            reference = [log_probability(model, asked, a) for a in answers]
        margins.append(BETA * ((policy[0] - reference[0]) - (policy[1] - reference[1])))
    return margins


def test_the_loss_is_equation_7(folder):
    model = model_of(folder)
    rows = model.encode(model.prepare(table(), range(5)))
    margins = [h.item() for h in naive(model)]
    assert min(margins) < 0 < max(margins)
    by_hand = [math.log(1 + math.exp(-h)) for h in margins]  # -log sigma(h)
    assert model.loss(rows.batch(range(5))).item() == pytest.approx(sum(by_hand) / 5, rel=1e-4)
    for i in range(5):
        assert model.loss(rows.batch([i])).item() == pytest.approx(by_hand[i], rel=1e-4)
        assert model.count_targets(rows.batch([i])) == 1
    found = model.evaluate(rows)
    assert found["n"] == 5
    assert found["accuracy"] == sum(h > 0 for h in margins) / 5
    assert found["loss"] == pytest.approx(sum(by_hand) / 5, rel=1e-4)
    assert found["reward_margin"] == pytest.approx(sum(margins) / 5, rel=1e-4)
    assert found["perplexity"] is None
    assert model.evaluate(rows.take([]))["accuracy"] is None


@pytest.mark.each_value
@pytest.mark.parametrize(
    "adaptation",
    [LORA, AdaptationSpec("ffa_lora", rank=2), AdaptationSpec("lora", rank=2, dora=True)],
    ids=["lora", "ffa_lora", "dora"],
)
@pytest.mark.parametrize("few", [False, True], ids=["counted", "all logits"])
def test_the_gradient_is_that_of_the_naive_loop(folder, monkeypatch, adaptation, few):
    model = model_of(folder, adaptation, scale=0.1)
    live = list(model.live().values())
    losses = [-torch.nn.functional.logsigmoid(h) for h in naive(model)]
    expected = torch.autograd.grad(sum(losses) / 5, live)
    fresh = model_of(folder, adaptation, scale=0.1)
    if not few:
        monkeypatch.setattr(next_token, "FEW", 0)
    rows = fresh.encode(fresh.prepare(table(), range(5)))
    assert [n for n, p in fresh.module.named_parameters() if p.requires_grad] == list(fresh.live())
    got = torch.autograd.grad(fresh.loss(rows.batch(range(5))), list(fresh.live().values()))
    for a, b in zip(got, expected, strict=True):
        assert a.abs().max() > 0
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-5)


def test_at_the_start_the_model_is_its_reference(folder):
    model = load(folder("llama"), table(), LORA, beta=BETA)
    found = model.evaluate(model.prepare(table(), range(5)))
    assert found["loss"] == pytest.approx(math.log(2), rel=1e-4)
    assert found["reward_margin"] == pytest.approx(0, abs=1e-4)


def test_the_reference_is_the_base_whatever_the_adapter_is(folder):
    model = model_of(folder)
    rows = model.prepare(table(), range(5))
    assert REFERENCE not in rows.tensors
    known = model.encode(rows)
    reference = known.tensors[REFERENCE]
    with torch.no_grad(), model.module.disable_adapter():
        expected = [[float(log_probability(model, asked, a)) for a in answers] for asked, *answers in TRIPLES]
    torch.testing.assert_close(reference, torch.tensor(expected), rtol=1e-4, atol=1e-4)
    assert model.encode(known) is known  # computed once
    model.load(model.params().map(lambda t: t + 1))
    assert torch.equal(model.encode(rows).tensors[REFERENCE], reference)
    # Without it a batch gives the same rewards.
    batch = rows.batch(range(5))
    torch.testing.assert_close(model.logits(batch), model.logits(known.batch(range(5))), rtol=1e-4, atol=1e-4)


def test_the_reference_stays_the_base_with_other_adapters_and_shifts(folder):
    model = model_of(folder)
    rows = model.prepare(table(), range(5))
    expected = model.encode(rows).tensors[REFERENCE]
    path = next(iter(n.partition(".lora_A.")[0] for n in model.names))
    layer = model.module.get_submodule(path)
    d = layer.base_layer.weight.shape
    shift = {path: (torch.ones(d[0], 1), torch.ones(1, d[1]))}
    other, plain = Expert(model.params().map(lambda t: t - 0.5), 0.5), model.predict(rows)
    for around in (
        experts(model, {"other": other, "own": Expert(weight=0.5)}),
        experts(model, {"other": other, "own": Expert(weight=0.5, layers=())}),
        shift_weights(model, shift),
    ):
        with around:
            before = model.predict(model.encode(rows))
            on = [m.disable_adapters for m in model.module.modules() if hasattr(m, "disable_adapters")]
            assert torch.equal(model.encode(rows).tensors[REFERENCE], expected)
            assert [m.disable_adapters for m in model.module.modules() if hasattr(m, "disable_adapters")] == on
            assert torch.equal(model.predict(model.encode(rows)), before)
            assert not torch.allclose(before, plain, atol=1e-3)  # the other adapter does count in what is learned


def test_parts_of_a_batch_give_its_step(folder):
    model = model_of(folder)
    start, rows = model.params(), model.encode(model.prepare(table(), range(5)))
    client = Client("a", ClientData(lambda: rows, lambda: rows, lambda: rows), model, {}, seed=3, trainer=train_client)
    whole, parts = (
        loop.train([Job(client, start, SGD(learning_rate=0.5, batch_size=4, epochs=2, micro_batch=micro))])[0]
        for micro in (None, 2)
    )
    assert float((whole - start).norm()) > 0.01
    for name, tensor in whole.items():
        torch.testing.assert_close(tensor, parts[name], rtol=1e-4, atol=1e-5)


def test_gradients_of_single_rows_are_clipped_one_by_one(folder):
    model = model_of(folder)
    rows, live = model.encode(model.prepare(table(), range(5))), model.live()
    assert not row_gradients.agrees(model, rows, np.arange(2), live)
    expected, c = 0.0, 0.05
    for i in range(5):
        g = torch.cat([p.reshape(-1) for p in torch.autograd.grad(model.loss(rows.batch([i])), list(live.values()))])
        expected = expected + g * min(1.0, c / float(g.norm()))
    found = row_gradients.clipped_sum(model, rows, np.arange(5), c, live, by_layers=False)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def test_conversations_are_asked_by_the_chat_template(folder):
    talk = (("user", "the fox"), ("assistant", "sing"), ("user", "a dog"))
    triples = [(talk, "jumps", "over")]
    model = model_of(folder)
    rows = model.prepare(table(triples), [0])
    second, starts = int(rows.tensors["second"]), rows.tensors["answer_start"][0].tolist()
    texts = [rows.tokens[0][:second], rows.tokens[0][second:]]
    decode = model.tools.tokenizer.decode
    assert [decode(t[s:]) for t, s in zip(texts, starts, strict=True)] == ["jumps [SEP]", "over [SEP]"]
    assert {decode(t[:s]) for t, s in zip(texts, starts, strict=True)} == {"<s> the fox sing [SEP] a dog"}


def test_long_rows_keep_one_prompt(folder):
    model = model_of(folder, max_length=8)
    rows = model.prepare(table([("the fox " * 8, "sing", "jumps over the dog")]), [0])
    second, starts = int(rows.tensors["second"]), rows.tensors["answer_start"][0].tolist()
    decode = model.tools.tokenizer.decode
    assert decode(rows.tokens[0][:second]) == "<s> fox the fox sing [SEP]"
    assert decode(rows.tokens[0][second:]) == "<s> fox the fox jumps over the dog"  # cut before its end token
    assert starts == [4, 4]


def test_the_prompts_hidden_state_and_the_operations(folder):
    model = model_of(folder)
    rows = model.prepare(table(), range(5))
    prompts = table([(asked, "a", "b") for asked, *_ in TRIPLES])
    torch.testing.assert_close(
        model.last_states(rows), model.last_states(model.prepare(prompts, range(5))), rtol=1e-4, atol=1e-5
    )
    macs = per_sample(model, rows)
    assert macs.once > 0  # the reference, once
    assert macs.training > macs.once  # the adapter comes on top


@pytest.mark.parametrize("name", ["full", "top_layers"])
def test_adaptations_that_change_the_base_are_refused(folder, name):
    with pytest.raises(InputError, match=f'model.adaptation.name: "{name}" changes the base.*use lora'):
        load(folder("llama"), table(), name)


@pytest.mark.filterwarnings("ignore")  # of TRL, which is not installed with fedfm
def test_steps_are_those_of_trl(folder, tmp_path):
    trl = pytest.importorskip("trl", reason="trl is not installed")
    from datasets import Dataset

    model = model_of(folder, scale=0.0)  # TRL's reference is the adapter at the start, which is then the base
    start, rows = model.params(), model.encode(model.prepare(table(), range(5)))
    client = Client("a", ClientData(lambda: rows, lambda: rows, lambda: rows), model, {}, seed=3, trainer=train_client)
    scores, trained = [model.evaluate(rows)], []
    for steps in range(1, 7):
        trained.append(loop.train([Job(client, start, SGD(learning_rate=2.0, batch_size=5, epochs=steps))])[0])
        scores.append(model.evaluate(rows))
    model.load(start)
    options = {"beta": BETA, "loss_type": "sigmoid", "max_length": 40, "precompute_ref_log_probs": False}
    options |= {"optim": "sgd", "learning_rate": 2.0, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    options |= {
        "per_device_train_batch_size": 5,
        "num_train_epochs": 6,
        "logging_steps": 1,
        "gradient_checkpointing": False,
    }
    options |= {"use_cpu": True, "report_to": [], "save_strategy": "no", "bf16": False, "disable_tqdm": True}
    given = Dataset.from_list([{"prompt": f"{x}\n", "chosen": a, "rejected": b} for x, a, b in TRIPLES])
    trainer = trl.DPOTrainer(
        model.module,
        args=trl.DPOConfig(output_dir=str(tmp_path), **options),
        train_dataset=given,
        processing_class=model.tools.tokenizer,
    )
    trainer.train()
    for line, found in zip(trainer.state.log_history[:6], scores[:6], strict=True):
        assert line["loss"] == pytest.approx(found["loss"], rel=1e-3)
        assert line["rewards/accuracies"] == pytest.approx(found["accuracy"])
        assert line["rewards/margins"] == pytest.approx(found["reward_margin"], rel=1e-2, abs=1e-4)
    assert scores[6]["loss"] < scores[0]["loss"] - 0.01
    assert float((model.params() - trained[-1]).norm()) < 1e-3 * float((trained[-1] - start).norm())
