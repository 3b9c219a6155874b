"""Recognises users' own language models; computes the loss of each row and, if rows mark prompts, the model's answers.

The outputs of such a model are logits over a vocabulary for each token, which a reader cannot use. So a row's result is
its loss, and the text that the model writes after the prompt. Rows mark a prompt by targets of -100, as Hugging Face's
collators do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedfm.core.rows import Batch
from fedfm.errors import InputError, first_line
from fedfm.models.families import unwrap
from fedfm.models.language.generation import GREEDY
from fedfm.models.preprocessing import IGNORE
from fedfm.models.quiet import quiet

if TYPE_CHECKING:
    from fedfm.models.user.user_module import Given

_AT_ONCE = 16  # largest number of prompts that share a batch
_NO_TOKENIZER = "there is no tokenizer; give a Trainer with processing_class"
_BY = "max_new_tokens of the module's generation_config"
_MOST = 256  # largest number of tokens of an answer, if neither the module nor the Trainer sets a limit


def gives_tokens(module: nn.Module, batch: Batch, output: Tensor) -> bool:
    """Whether this batch's output (b, L, V) has a logit for each entry of a vocabulary at each token."""
    whole = [x for x in batch.values() if isinstance(x, Tensor) and x.dim() == 2 and not x.is_floating_point()]
    if not whole or not whole[0].numel() or output.dim() != 3 or output.shape[:2] != whole[0].shape:
        return False
    inner: Any = unwrap(module)
    if type(inner).__module__.startswith("transformers.") and inner.get_output_embeddings() is None:
        return False  # for example a classifier of tokens
    read = max(int(x.max()) for x in whole if x.numel())  # largest token id; a vocabulary has more entries
    sizes = {m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding) and m.num_embeddings > read}
    sizes.add(getattr(getattr(module, "config", None), "vocab_size", None) or 0)
    return output.shape[2] in sizes


def translates(module: nn.Module) -> bool:
    """Whether the module is an encoder-decoder that writes text from an input, such as T5 or Whisper."""
    inner: Any = unwrap(module)
    both = getattr(getattr(inner, "config", None), "is_encoder_decoder", False)
    return bool(both and hasattr(inner, "can_generate") and inner.can_generate())


def translations(given: Given, rows: Sequence[Any]) -> dict[str, Any]:
    """Results of an encoder-decoder on rows, as in :func:`evaluate`, with an answer to each input.

    Raises:
        InputError: the module fails on the inputs.
    """
    losses = [_loss(given, given.batch([row])) for row in rows]
    known = [loss for loss in losses if loss is not None]
    found: dict[str, Any] = {"predictions": [], "probabilities": [], "losses": losses}
    found["perplexities"] = [_exponential(loss) for loss in losses]
    found["loss"] = sum(known) / len(known) if known else None
    found["perplexity"] = _exponential(found["loss"])
    if _tokenizer(given) is None:
        return found | {"warnings": [f"no answers: {_NO_TOKENIZER}"]}
    limit, stops, pad, half = _limits(given)
    ends = {"eos_token_id": sorted(stops) or None, "pad_token_id": pad, "max_new_tokens": limit}
    answers, cut = [""] * len(rows), []
    for start in range(0, len(rows), _AT_ONCE):
        batch = given.batch([rows[i] for i in range(start, min(start + _AT_ONCE, len(rows)))])
        inputs = {name: x for name, x in given.inputs(batch).items() if not name.startswith("decoder_")}
        said = _generate(given.module, half, **inputs, **ends)
        for i, ids in enumerate(said[:, 1:].tolist(), start):  # every answer begins with the start token
            answers[i], ended = _text(_tokenizer(given), ids, stops)
            cut += [] if ended else [i]
    return found | {"answers": answers, "cut": cut, "answer_tokens": limit, "limited_by": _BY}


def evaluate(given: Given, rows: Sequence[Any]) -> dict[str, Any]:
    """Results of a language model on rows.

    Returns:
        ``losses``: the run's own loss of each single row, null for a row without a target;
        ``perplexities``: their exponentials, null also for a row of two texts;
        ``loss``: the mean over rows; ``perplexity``: its exponential;
        ``answers``, ``cut`` and ``answer_tokens`` if rows mark prompts;
        ``warnings``: the reason if there are no answers.

    Raises:
        InputError: the rows have neither targets nor prompts.
    """
    batches = [given.batch([row]) for row in rows]
    losses = [_loss(given, batch) for batch in batches]
    known = [loss for loss in losses if loss is not None]
    found: dict[str, Any] = {"predictions": [], "probabilities": [], "losses": losses}
    found["perplexities"] = [
        _exponential(loss) if _of_tokens(b) else None for loss, b in zip(losses, batches, strict=True)
    ]
    found["loss"] = sum(known) / len(known) if known else None
    found["perplexity"] = _exponential(found["loss"]) if all(map(_of_tokens, batches)) else None
    prompts = [_prompt(batch) for batch in batches]
    why = _unable(given, prompts)
    if why and not known:
        raise InputError(f"the rows have no target, so there is no loss, and there are no answers: {why}")
    return found | ({"warnings": [f"no answers: {why}"]} if why else _answers(given, prompts))


def _loss(given: Given, batch: Batch) -> float | None:
    """The run's loss of one row; None if the row has no target."""
    labels = batch.get("labels")
    if labels is not None and bool((labels == IGNORE).all()):
        return None
    try:
        with torch.random.fork_rng(devices=[]):
            value = float(given.outcome(given.module, batch)[0])
    except (TypeError, ValueError, RuntimeError, KeyError, InputError):
        if labels is not None:
            raise
        return None
    return value if math.isfinite(value) else None


def _of_tokens(batch: Batch) -> bool:
    """Whether the loss of this row is a mean over tokens; the loss of a row of two texts compares the texts."""
    tokens = next((x for x in batch.values() if isinstance(x, Tensor) and x.dim() == 2), None)
    return tokens is None or len(tokens) == 1


def _exponential(loss: float | None) -> float | None:
    return None if loss is None or loss > 700 else math.exp(loss)


def _prompt(batch: Batch) -> Tensor | None:
    """The tokens (p,) of the row before its targets; None if the row marks no prompt."""
    ids, labels, mask = (batch.get(name) for name in ("input_ids", "labels", "attention_mask"))
    if ids is None or ids.dim() != 2 or len(ids) != 1:  # a row of preferences is two texts
        return None
    real = torch.ones_like(ids[0], dtype=torch.bool) if mask is None or mask.dim() != 2 else mask[0].bool()
    if labels is None:
        return ids[0][real]
    if labels.shape != ids.shape:
        return None
    asked = (labels[0][real] == IGNORE).long().cumprod(0).sum()
    return ids[0][real][: int(asked)] if asked else None


def _unable(given: Given, prompts: Sequence[Tensor | None]) -> str:
    """Why there are no answers; "" if there are answers."""
    can = getattr(unwrap(given.module), "can_generate", None)
    if can is None or not can():
        return "the module has no generate(...) of transformers"
    if any(prompt is None for prompt in prompts):
        return "rows do not mark a prompt by targets of -100 at its tokens"
    if _tokenizer(given) is None:
        return _NO_TOKENIZER
    return ""


def _tokenizer(given: Given) -> Any:
    """The Trainer's tokenizer, which may be inside a processor."""
    found = getattr(given.trainer, "processing_class", None)
    return getattr(found, "tokenizer", found)


def _places(module: Any) -> int:
    return getattr(module.config, "max_position_embeddings", None) or 2 * _MOST


def _limits(given: Given) -> tuple[int, set[int], int, bool]:
    """An answer's largest number of tokens, its end tokens, the padding token, and whether bfloat16 is used."""
    module: Any = given.module
    tokenizer, settings, arguments = _tokenizer(given), module.generation_config, getattr(given.trainer, "args", None)
    places = _places(module)
    longest = getattr(arguments, "max_length", None) or places
    limit = settings.max_new_tokens or min(_MOST, longest, places // 2)
    ends = settings.eos_token_id
    stops = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(stops, default=0)
    return limit, stops, pad, arguments is not None and arguments.bf16


def _generate(module: Any, half: bool, **inputs: Any) -> Tensor:
    """Greedy answers (b, L) of ``generate``.

    Raises:
        InputError: the module fails on the inputs.
    """
    device = next(module.parameters()).device.type
    try:
        with quiet(), torch.autocast(device, torch.bfloat16) if half else nullcontext():
            return module.generate(**inputs, **GREEDY)  # type: ignore[no-any-return]
    except (TypeError, ValueError, RuntimeError, KeyError) as error:
        raise InputError(f"generate() fails on these rows: {type(error).__name__}: {first_line(error, 300)}") from error


def _text(tokenizer: Any, ids: list[int], stops: set[int]) -> tuple[str, bool]:
    """The text of the answer in these tokens, and whether an end token ends it."""
    end = next((k for k, token in enumerate(ids) if token in stops), len(ids))
    return tokenizer.decode(ids[:end], skip_special_tokens=True), end < len(ids)


def _answers(given: Given, prompts: Sequence[Any]) -> dict[str, Any]:
    """Greedy answers; prompts of the same length share a batch, so that no prompt is padded."""
    limit, stops, pad, half = _limits(given)
    places = _places(given.module)
    answers, cut = [""] * len(prompts), []
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    while order:
        length = len(prompts[order[0]])
        some = [i for i in order[:_AT_ONCE] if len(prompts[i]) == length]
        order = order[len(some) :]
        asked = torch.stack([prompts[i][-max(places - limit, 1) :] for i in some])
        ends = {"eos_token_id": sorted(stops) or None, "pad_token_id": pad, "max_new_tokens": limit}
        said = _generate(given.module, half, input_ids=asked, attention_mask=torch.ones_like(asked), **ends)
        for i, ids in zip(some, said[:, asked.shape[1] :].tolist(), strict=True):
            answers[i], ended = _text(_tokenizer(given), ids, stops)
            cut += [] if ended else [i]
    return {"answers": answers, "cut": sorted(cut), "answer_tokens": limit, "limited_by": _BY}


def lines(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A record for each row of :func:`evaluate`."""
    found: list[dict[str, Any]] = [
        {"loss": loss, "perplexity": perplexity}
        for loss, perplexity in zip(result["losses"], result["perplexities"], strict=True)
    ]
    if "answers" in result:
        cut = set(result["cut"])
        found = [
            {"answer": answer, "cut": i in cut} | line
            for i, (answer, line) in enumerate(zip(result["answers"], found, strict=True))
        ]
    return found
