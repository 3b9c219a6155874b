import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, f1_score, log_loss, recall_score
from tiny_models import load, prose, real, sentences, vectors

from fedfm.data.table import Table
from fedfm.errors import InputError
from fedfm.models import text_metrics
from fedfm.models.class_counts import count
from fedfm.models.metrics import confusion, evaluate, scores
from fedfm.models.text_metrics import Answer, answer_limit, answers, references, rouge_1


@given(st.integers(1, 40), st.integers(2, 6), st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_scores_are_those_of_scikit_learn(n, classes, seed):
    rng = np.random.default_rng(seed)
    logits, y = rng.normal(size=(n, classes)), rng.integers(0, classes, n)
    s, p = scores(torch.tensor(logits), torch.tensor(y)), logits.argmax(1)
    assert s["n"] == n
    assert s["accuracy"] == pytest.approx(accuracy_score(y, p))
    # scikit-learn's balanced accuracy: mean recall over the classes that occur.
    assert s["balanced_accuracy"] == pytest.approx(
        recall_score(y, p, labels=np.unique(y), average="macro", zero_division=0)
    )
    assert s["macro_f1"] == pytest.approx(f1_score(y, p, average="macro", zero_division=0))
    proba = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert s["loss"] == pytest.approx(log_loss(y, proba, labels=range(classes)))
    json.dumps(s, allow_nan=False)


def test_no_rows_and_no_labels_give_none():
    table = vectors()
    model = load("features", table)
    empty = evaluate(model, model.prepare(table, []))
    assert empty["n"] == 0
    assert empty["accuracy"] is None
    assert empty["loss"] is None
    blind = Table("features", table.inputs, None, (), table.split)
    assert evaluate(model, model.prepare(blind, range(5))) == empty | {"n": 5}


def test_infinite_loss_is_none():
    s = scores(torch.tensor([[math.inf, 0.0]]), torch.tensor([1]))
    assert s["loss"] is None
    json.dumps(s, allow_nan=False)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_perplexity_is_that_of_a_naive_loop(folder, family):
    table = prose(6)
    model = load(folder(family), table, "lora", max_length=7)
    rows = model.prepare(table, range(6))
    assert len({len(t) for t in rows.tokens}) > 1  # the last block is shorter
    nll, hits, tokens = 0.0, 0, 0
    with torch.no_grad():
        for row in rows.tokens:
            z = model.module(input_ids=row[None]).logits[0]
            for i in range(len(row) - 1):
                nll -= F.log_softmax(z[i].double(), -1)[row[i + 1]].item()
                hits += int(z[i].argmax() == row[i + 1])
                tokens += 1
    s = evaluate(model, rows, batch_size=4)
    assert s["tokens"] == tokens
    assert s["loss"] == pytest.approx(nll / tokens, rel=1e-5)
    assert s["perplexity"] == pytest.approx(math.exp(nll / tokens), rel=1e-5)
    assert s["accuracy"] == pytest.approx(hits / tokens)
    assert s["balanced_accuracy"] is None
    batch = rows.batch(range(len(rows)))
    assert model.loss(batch).item() == pytest.approx(nll / tokens, rel=1e-5)
    assert evaluate(model, rows.take([]))["perplexity"] is None


def test_blocks_of_a_language_model_hold_every_token_once(folder):
    table = prose(6)
    model = load(folder("llama"), table, "lora", max_length=7)
    rows = model.prepare(table, range(6))
    tokenizer = model.tools.tokenizer
    ids = tokenizer("".join(table.inputs), add_special_tokens=False)["input_ids"]
    assert all(t[0] == tokenizer.bos_token_id and 1 < len(t) <= 7 for t in rows.tokens)
    assert torch.cat([t[1:] for t in rows.tokens]).tolist() == ids
    plain = load(folder("llama"), sentences(), "lora", max_length=7, task="language_modelling")
    assert len(plain.prepare(sentences(), range(5))) > 0  # rows of a csv serve as passages
    assert len(model.prepare(table, [])) == 0


def test_instructions_are_scored_on_the_answer_alone(folder):
    pairs = [("the quick fox", "jumps over"), ("seven small birds", "sing"), ("a", "b")]
    table = Table("instruction", pairs, None, (), np.full(3, "train"))
    model = load(folder("llama"), table, "lora", max_length=16)
    rows = model.prepare(table, range(3))
    assert references(model, rows) == ["jumps over", "sing", "b"]
    nll, tokens = 0.0, 0
    with torch.no_grad():
        for row, start in zip(rows.tokens, rows.tensors["answer_start"].tolist(), strict=True):
            z = F.log_softmax(model.module(input_ids=row[None]).logits[0].double(), -1)
            for i in range(start, len(row)):
                nll -= z[i - 1, row[i]].item()
                tokens += 1
    assert tokens == 2 + 1 + 1 + 3  # the answers' words, and the end after each
    s = evaluate(model, rows)
    assert s["loss"] == pytest.approx(nll / tokens, rel=1e-5)
    exact = sum(a.text.strip() == b for a, b in zip(answers(model, rows), references(model, rows), strict=True)) / 3
    assert s["accuracy"] == s["exact_match"] == exact
    silent = load(folder("llama"), table, "lora", max_length=16, answer_tokens=0)
    unsaid = evaluate(silent, silent.prepare(table, range(3)))
    assert unsaid["loss"] == s["loss"]  # of the answers that are given: none is generated for it
    assert unsaid["accuracy"] is unsaid["exact_match"] is unsaid["rouge_1"] is None
    assert all(len(model.tools.tokenizer(a.text)["input_ids"]) <= 4 for a in short_answers(folder, table))


def short_answers(folder, table):
    model = load(folder("llama"), table, "lora", max_length=16, answer_tokens=3)
    return answers(model, model.prepare(table, range(3)))


def alone(model, row, start, pad):
    """The answer to one prompt by transformers itself, whether it ends, and how much the first token leads the second
    at each step.
    """
    prompt = row[:start][None]
    with torch.no_grad():
        said = model.module.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=answer_limit(model),
            do_sample=False,
            pad_token_id=pad,
            output_scores=True,
            return_dict_in_generate=True,
        )
    leads = [float(torch.topk(s[0], 2).values @ torch.tensor([1.0, -1.0])) for s in said.scores]
    ids, ends = said.sequences[0, start:], model.module.generation_config.eos_token_id
    ended = int(ids[-1]) in ([ends] if isinstance(ends, int) else ends)
    text = model.tools.tokenizer.decode(ids, skip_special_tokens=True)
    return Answer(tuple(ids.tolist()), text, cut=not ended), min(leads)


def same_as_alone(model, rows, **size):
    """How many rows are answered as each is alone; those whose words were nearly tied do not count."""
    found, firm = answers(model, rows, **size), 0
    for row, start, answer in zip(rows.tokens, rows.tensors["answer_start"].tolist(), found, strict=True):
        expected, lead = alone(model, row, start, rows.pad)
        if lead > 1e-4:
            assert answer == expected
            firm += 1
    return firm


@pytest.mark.each_value
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("size", [1, 4, 64])
def test_prompts_are_answered_together_as_each_alone(folder, family, size):
    words = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog")
    rng = np.random.default_rng(0)
    pairs = [(" ".join(rng.choice(words, rng.integers(1, 9))), "sing") for _ in range(9)]
    table = Table("instruction", pairs, None, (), np.full(9, "train"))
    model = load(folder(family), table, "lora", max_length=24, answer_tokens=12)  # these models have 40 places
    model.load(model.params().map(lambda t: t + 0.5 * torch.randn(t.shape, generator=torch.Generator().manual_seed(1))))
    model.module.generation_config.eos_token_id = [3, 12]  # so that some answers end before others
    rows = model.prepare(table, range(9))
    assert len(set(rows.tensors["answer_start"].tolist())) > 3
    assert same_as_alone(model, rows, batch_size=size) >= 6
    assert answers(model, rows.take([])) == []


@pytest.mark.parametrize("short", ["tokens", "memory"])
def test_a_batch_of_answers_is_as_large_as_tokens_and_memory_allow(folder, monkeypatch, short):
    words = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog")
    pairs = [(" ".join(words[:n]), "sing") for n in (1, 9, 2, 8, 3, 7, 4)]
    model = load(folder("llama"), asking(pairs), "lora", max_length=24, answer_tokens=5)
    rows = model.prepare(asking(pairs), range(7))
    expected, sizes, generate = answers(model, rows), [], model.module.generate

    def counted(input_ids, **options):
        if short == "memory" and len(input_ids) > 2:
            raise torch.OutOfMemoryError("no room")
        sizes.append(tuple(input_ids.shape))
        return generate(input_ids=input_ids, **options)

    monkeypatch.setattr(model.module, "generate", counted)
    if short == "memory":
        with pytest.warns(RuntimeWarning, match="out of memory: from here on 2 rows at once"):
            assert answers(model, rows, batch_size=5) == expected
        assert [n for n, _ in sizes] == [2, 2, 1, 2]  # the second batch is small from the start
        return
    monkeypatch.setattr(text_metrics, "TOKENS", 40)
    assert answers(model, rows) == expected
    assert sum(n for n, _ in sizes) == 7
    assert max(n for n, _ in sizes) > 1
    assert all(n == 1 or n * (length + 5) <= 40 for n, length in sizes)
    assert all(n * (length + 5) > 20 for n, length in sizes[:-1])  # and no smaller


def asking(pairs):
    return Table("instruction", pairs, None, (), np.full(len(pairs), "train"))


def saying(model, monkeypatch, said):
    """Let the model say the same tokens to every prompt."""
    ids = model.tools.tokenizer(said, add_special_tokens=False)["input_ids"]

    def generate(input_ids, max_new_tokens, **_):
        return torch.cat([input_ids, torch.tensor(ids[:max_new_tokens]).expand(len(input_ids), -1)], 1)

    monkeypatch.setattr(model.module, "generate", generate)


def test_answers_are_compared_with_the_complete_reference(folder, monkeypatch):
    """Half of it is half right, also where training sees no more of it than that."""
    long = (
        "the quick brown fox jumps over a lazy dog while seven small birds sing"  # 14 words, of which 12 are trained on
    )
    table = asking([("the fox", long)])
    model = load(folder("llama"), table, "lora", max_length=16)
    rows = model.prepare(table, [0])
    assert len(rows.tokens[0]) - int(rows.tensors["answer_start"][0]) == 13
    assert references(model, rows) == [long]
    saying(model, monkeypatch, " ".join(long.split()[:8]))
    found = evaluate(model, rows)
    assert found["exact_match"] == 0
    assert found["rouge_1"] == pytest.approx(2 * 8 / (8 + 14))
    assert found["answers_cut"] == 1
    saying(model, monkeypatch, long + " [SEP]")
    whole = {"exact_match": 1, "accuracy": 1, "rouge_1": 1, "answers_cut": 0}
    sums = {"exact_answers": 1, "rouge_of_answers": 1, "cut_answers": 0}
    assert evaluate(model, rows) | {"n": 1} == found | whole | sums


def test_an_answer_does_not_depend_on_the_right_one(folder):
    """Training cuts a long prompt to the length that the right answer leaves."""
    question = " ".join(["the quick brown fox jumps over a lazy dog"] * 3)
    pairs = [(question, "sing"), (question, "seven small birds sing while a lazy dog jumps")]
    model = load(folder("llama"), asking(pairs), "lora", max_length=16)
    rows = model.prepare(asking(pairs), range(2))
    assert len({*rows.tensors["answer_start"].tolist()}) == 2
    assert len({a.text for a in answers(model, rows)}) == 1


def test_the_limit_of_an_answer_leaves_room_for_the_prompt(folder):
    """These models have 40 positions; GPT-2 has no numbers for more."""
    table = asking([(" ".join(["the quick brown fox"] * 20), "sing")])
    for family in ("gpt2", "llama"):
        for most, limit in ((None, 20), (39, 39), (3, 3)):
            model = load(folder(family), table, "lora", max_length=64, answer_tokens=most)
            assert answer_limit(model) == limit
            assert len(answers(model, model.prepare(table, [0]))) == 1
        assert answer_limit(load(folder(family), table, "lora", max_length=12)) == 12
        with pytest.raises(InputError, match=r"answer_tokens = 40: .* 40 positions .* at most 39"):
            load(folder(family), table, "lora", answer_tokens=40)


def test_the_end_that_training_teaches_ends_an_answer(folder):
    """The tokenizer's, also where the model's own configuration names none."""
    table = asking([("the quick fox", "sing"), ("a dog", "sing")])
    model = load(folder("llama"), table, "full", max_length=16)
    model.module.generation_config.eos_token_id = None
    end = model.tools.tokenizer.eos_token_id
    with torch.no_grad():  # it says nothing but the end
        model.module.lm_head.weight.zero_()
        model.module.model.norm.weight.fill_(1.0)
        model.module.lm_head.weight[end] = 1.0
        hidden = model.module.model(input_ids=torch.tensor([[5, 6]])).last_hidden_state[0, -1]
        model.module.lm_head.weight[end] = hidden
    rows = model.prepare(table, [0])
    assert [a.cut for a in answers(model, rows)] == [False]


@pytest.mark.proof
def test_real_answers_are_the_same_together():
    tales = ["Tom had a red ball", "The sun was", "Lily and her mom went to the park to", "One day a cat", "Ben saw a"]
    table = Table("instruction", [(t, "ok") for t in tales * 2], None, (), np.full(10, "train"))
    model = load(real("stories260K-llama"), table, "lora")
    assert same_as_alone(model, model.prepare(table, range(10))) >= 8


@pytest.mark.parametrize(
    ("answer", "reference", "f1"),
    [("a b", "a b", 1.0), ("a", "b", 0.0), ("", "", 1.0), ("the cat", "The dog sat", 2 / 5), ("a a", "a", 2 / 3)],
)
def test_rouge_1_is_the_f1_of_common_words(answer, reference, f1):
    assert rouge_1(answer, reference) == pytest.approx(f1)


@given(st.integers(1, 30), st.integers(2, 5), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_a_row_without_an_answer_is_a_wrong_prediction_of_no_class(n, classes, seed):
    """Compared with scikit-learn, with a further class for such rows that is not averaged over."""
    rng = np.random.default_rng(seed)
    logits, labels = torch.from_numpy(rng.normal(size=(n, classes))), torch.from_numpy(rng.integers(0, classes, n))
    silent = torch.from_numpy(rng.random(n) < 0.3)
    silent[0] = False
    said = torch.where(silent, classes, logits.argmax(-1)).numpy()
    logits[silent] = -torch.inf
    found, y = scores(logits, labels), labels.numpy()
    among = sorted({*y.tolist(), *said.tolist()} - {classes})
    assert found["n"] == found["rows"] == n
    assert found["right"] == (said == y).sum()
    assert found["accuracy"] == pytest.approx(accuracy_score(y, said))
    recall = recall_score(y, said, labels=sorted(set(y.tolist())), average="macro", zero_division=0)
    assert found["balanced_accuracy"] == pytest.approx(recall)
    assert found["macro_f1"] == pytest.approx(f1_score(y, said, labels=among, average="macro", zero_division=0))
    loss = -logits[~silent].log_softmax(1)[torch.arange(int((~silent).sum())), labels[~silent]].mean()
    assert found["loss"] == pytest.approx(float(loss))
    assert found["loss_of_rows"] == pytest.approx(n * float(loss))
    assert sum(map(sum, confusion(logits, labels))) == sum(count(logits, labels).cells.values()) == (~silent).sum()


def test_rows_without_any_answer_have_no_loss():
    found = scores(torch.full((3, 2), -torch.inf), torch.tensor([0, 1, 1]))
    assert (found["accuracy"], found["loss"], found["right"]) == (0, None, 0)
