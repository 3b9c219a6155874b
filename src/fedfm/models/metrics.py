"""How good a model is on rows: numbers that go into JSON as they are, None where a number is not defined."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedfm.models.model import IGNORE, Model
from fedfm.rows import Rows

Scores = dict[str, Any]


def evaluate(model: Model, rows: Rows, batch_size: int = 64) -> Scores:
    """Scores of the model on the rows.

    Returns:
        ``n`` (rows), ``accuracy``, ``balanced_accuracy``, ``macro_f1``, ``loss``, ``perplexity``, ``tokens``, and for
        instructions ``exact_match``, ``rouge_1``. ``loss`` is the mean over rows, for language models over predicted
        tokens; ``perplexity`` = exp(loss) and ``accuracy`` that of the next token; for instructions the accuracy is
        exact match of the answers.

    Example:
        >>> from fedfm.models.wrap import wrap
        >>> model = wrap(torch.nn.Identity(), lambda module, batch: batch["features"].sum(), classes=("a", "b"))
        >>> rows = Rows({"features": torch.eye(2)}, labels=torch.tensor([0, 0]))
        >>> evaluate(model, rows)["accuracy"]
        0.5
    """
    if (own := getattr(model, "scores_function", None)) is not None:
        return own(model, rows, batch_size)  # type: ignore[no-any-return]
    if model.is_language_model:
        found = _language(model, rows, batch_size)
        if model.task == "instruction":
            found |= _instruction(model, rows)
        return found
    if rows.labels is None or not len(rows):
        return nothing(n=len(rows))
    return scores(model.predict(rows, batch_size), rows.labels)


def scores(logits: Tensor, labels: Tensor) -> Scores:
    """Scores of logits (n, C) against labels (n,).

    ``balanced_accuracy`` is the mean recall over the classes that occur in ``labels``; ``macro_f1`` the mean F1
    over the classes that occur in labels or predictions (scikit-learn's definitions).
    """
    n = len(labels)
    if not n:
        return nothing()
    predicted = logits.argmax(-1)
    classes = max(logits.shape[-1], int(labels.max()) + 1)
    table = torch.bincount(labels * classes + predicted, minlength=classes**2).view(classes, classes).double()
    hit, actual, guessed = table.diagonal(), table.sum(1), table.sum(0)
    recall = (hit / actual)[actual > 0]
    occurs = actual + guessed > 0
    return nothing(n) | {
        "accuracy": float(hit.sum()) / n,
        "balanced_accuracy": float(recall.mean()),
        "macro_f1": float((2 * hit / (actual + guessed))[occurs].mean()),
        "loss": _finite(float(F.cross_entropy(logits.double(), labels))),
    }


def _language(model: Model, rows: Rows, batch_size: int) -> Scores:
    """Sums over tokens in float64, without keeping logits of more than one batch."""
    total, hits, tokens = 0.0, 0, 0
    with torch.no_grad(), model.evaluating():
        for batch in rows.batches(batch_size):
            logits, targets = model.flat(model.logits(batch), batch)
            counts = targets != IGNORE
            total += float(F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none").double().sum())
            hits += int((logits.argmax(-1) == targets)[counts].sum())
            tokens += int(counts.sum())
    if not tokens:
        return nothing(n=len(rows))
    loss = total / tokens
    return nothing(len(rows)) | {
        "accuracy": hits / tokens,
        "loss": _finite(loss),
        "perplexity": _finite(math.exp(min(loss, 709.0))),
        "tokens": tokens,
    }


def _instruction(model: Model, rows: Rows) -> Scores:
    if not len(rows) or not model.spec.answer_tokens:
        return {"accuracy": None, "exact_match": None, "rouge_1": None}
    pairs = list(zip(answers(model, rows), references(model, rows), strict=True))
    exact = sum(a.strip() == b.strip() for a, b in pairs) / len(pairs)
    return {"accuracy": exact, "exact_match": exact, "rouge_1": sum(rouge_1(a, b) for a, b in pairs) / len(pairs)}


def answers(model: Model, rows: Rows, batch_size: int = 64) -> list[str]:
    """What the model answers, greedily, to the prompts of instruction rows.

    Prompts of like length are answered together, padded on the left, where no answer looks: what a row says alone, but
    for a tie of two tokens that the last bit decides.
    """
    tokens, starts = rows.tokens or (), rows.tensors["answer_start"].tolist()
    share = rows.tensors.get("local_share")
    order = sorted(range(len(tokens)), key=lambda i: starts[i])
    out = [""] * len(tokens)
    generate: Any = getattr(model.module, "generate")  # noqa: B009  (a method that only causal models have)
    ends = _ends(model)
    with torch.no_grad(), model.evaluating():
        for at in range(0, len(order), batch_size):
            some = order[at : at + batch_size]
            longest = starts[some[-1]]
            prompts = torch.full((len(some), longest), rows.pad)  # (b, L)
            for row, i in zip(prompts, some, strict=True):
                row[longest - starts[i] :] = tokens[i][: starts[i]]
            mask = torch.arange(longest) >= longest - torch.tensor([starts[i] for i in some])[:, None]  # (b, L)
            model.share = None if share is None else share[some]
            said = generate(
                input_ids=prompts.to(model.device),
                attention_mask=mask.long().to(model.device),
                max_new_tokens=model.spec.answer_tokens,
                do_sample=False,
                pad_token_id=rows.pad,
            )
            for i, ids in zip(some, said[:, longest:].tolist(), strict=True):
                out[i] = model.tools.tokenizer.decode(_until(ids, ends), skip_special_tokens=True)
    return out


def _ends(model: Model) -> set[int]:
    """The tokens that end an answer."""
    module: Any = model.module
    found = module.generation_config.eos_token_id
    return set() if found is None else {found} if isinstance(found, int) else set(found)


def _until(ids: list[int], ends: set[int]) -> list[int]:
    """Up to the first end, which counts; what follows waited for the others of the batch."""
    stop = next((i for i, token in enumerate(ids) if token in ends), len(ids))
    return ids[: stop + 1]


def references(model: Model, rows: Rows) -> list[str]:
    """The right answers of instruction rows."""
    starts = rows.tensors["answer_start"].tolist()
    decode = model.tools.tokenizer.decode
    return [decode(t[s:], skip_special_tokens=True) for t, s in zip(rows.tokens or (), starts, strict=True)]


def rouge_1(answer: str, reference: str) -> float:
    """F1 of the words that answer and reference have in common, lower case (Lin 2004)."""
    a, b = Counter(answer.lower().split()), Counter(reference.lower().split())
    common = sum((a & b).values())
    return 2 * common / (sum(a.values()) + sum(b.values())) if common else float(a == b)


def nothing(n: int = 0) -> Scores:
    """The scores of ``n`` rows of which nothing is known."""
    keys = ("accuracy", "balanced_accuracy", "macro_f1", "loss", "perplexity", "tokens")
    return {"n": n} | dict.fromkeys(keys)


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None
