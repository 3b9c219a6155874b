"""How a classifier pools its tokens' states into one vector per row, found by comparison with its own logits.

Some classes of transformers apply the head to each token and pool the results, each class in its own way: it takes the
last token, the token after it, or the mean of all. The right way is the one for which the head reproduces the model's
own logits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedfm.core.rows import Batch, Rows
from fedfm.errors import InputError
from fedfm.models.network import Network, Pool
from fedfm.models.probe_rows import made_texts, probe_rows

_CLOSE = 1e-3  # largest accepted difference of two logits in float32, as a share of the largest logit
_ROUGHLY = 0.05  # the same in 16 bits


def last(x: Tensor, batch: Batch, pad: int | None) -> Tensor:
    """The state of the last token before padding; for rows without tokens, the state of the last position."""
    return _at(x, _last_index(x, batch, pad))


def _whole(x: Tensor, _: Batch, __: int | None) -> Tensor:
    return x


def _behind_last(x: Tensor, batch: Batch, pad: int | None) -> Tensor:
    """The state one position after the last token, for a decoder that reads its text shifted by one."""
    return _at(x, (_last_index(x, batch, pad) + 1).clamp(max=x.shape[1] - 1))


def _mean(x: Tensor, batch: Batch, pad: int | None) -> Tensor:
    """The mean over the tokens in the attention mask."""
    if "attention_mask" not in batch:
        return x.mean(1)
    weight = batch["attention_mask"].to(x).unsqueeze(-1)  # (b, T, 1)
    return (x * weight).sum(1) / weight.sum(1)


WAYS: tuple[Pool, ...] = (last, _behind_last, _mean, lambda x, _, __: x[:, 0], lambda x, _, __: x.mean(1))


def _at(x: Tensor, index: Tensor) -> Tensor:
    return x[torch.arange(len(x), device=x.device), index]


def _last_index(x: Tensor, batch: Batch, pad: int | None) -> Tensor:
    if "input_ids" not in batch or pad is None:
        return torch.full((len(x),), x.shape[1] - 1, device=x.device)
    real = batch["input_ids"].to(x.device) != pad
    return (torch.arange(x.shape[1], device=x.device) * real).argmax(-1)


def way_of(model: Network, head: nn.Linear, rows: Rows) -> Pool:
    """How this model pools its head's inputs (b, T, d); inputs (b, d) are used unchanged.

    For a text model the check uses invented texts, so that the server and all clients find the same way. The head's
    values do not matter.

    Raises:
        InputError: no known way fits, or a text's result depends on the other texts of its batch.
    """
    made = probe_rows(model, rows)
    batch = made.to_padded().batch(range(2))
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(head.out_features, head.in_features, generator=generator).to(model.device)
    caught: list[Tensor] = []

    def give(_: nn.Module, args: tuple[Tensor, ...], __: Tensor) -> Tensor:
        caught.append(args[0])
        return F.linear(args[0].float(), probe)

    hook = head.register_forward_hook(give)
    try:
        with model.evaluating():
            logits = model.outputs(batch)
            alone = model.outputs(made.take([0]).to_padded().batch([0]))
    finally:
        hook.remove()
    if not _agree(model, alone, logits[:1]):
        raise InputError(
            f"model.name: {_of_padding(model)}, so that a text has no features of its own: expected another model, or "
            "a method and an adaptation that train through the whole model, such as fedavg with lora or full"
        )
    states = caught[0]
    for way in WAYS if states.dim() == 3 else (_whole,):
        if _agree(model, F.linear(way(states, batch, padding(model)).float(), probe), logits):
            return way
    raise _no_features(model)


def of_padding(model: Network) -> list[str]:
    """A notice if a text classifier's logits depend on the other texts of a batch."""
    made = made_texts(model)
    with model.evaluating():
        both, alone = (model.outputs(made.take(i).to_padded().batch(range(len(i)))) for i in ([0, 1], [0]))
    if _agree(model, alone, both[:1]):
        return []
    return [f"{_of_padding(model)}: predictions, also an export's, depend on the other texts of a batch"]


def _of_padding(model: Network) -> str:
    text = f"the logits of {model.spec.name!r} for a text depend on the padding after it"
    stated, ours = getattr(getattr(model.module, "config", None), "pad_token_id", None), padding(model)
    if stated is None or stated == ours:
        return text
    return f"{text} (pad_token_id of its config.json is {stated}, and its tokenizer pads with {ours})"


def padding(model: Network) -> int | None:
    """The padding token of the model's rows; None for rows without tokens."""
    tokenizer = model.tools.tokenizer
    return None if tokenizer is None else tokenizer.pad_token_id


def check_agrees(model: Network, head: nn.Linear, pooled: Tensor, logits: Tensor) -> None:
    """Raise an InputError if the head does not map the pooled states (b, d) to the model's logits (b, C)."""
    with torch.no_grad():
        ours = head(pooled.to(head.weight.dtype))
    if not _agree(model, ours, logits):
        raise _no_features(model)


def _agree(model: Network, ours: Tensor, theirs: Tensor) -> bool:
    """Whether two tensors of logits are equal within rounding; NaN in both counts as equal."""
    if ours.shape != theirs.shape:
        return False
    ours, theirs = ours.float(), theirs.float()
    finite = theirs[theirs.isfinite()]
    size = finite.abs().max().item() if len(finite) else 0.0
    close = _CLOSE if model.spec.dtype == "float32" else _ROUGHLY
    return torch.allclose(ours, theirs, rtol=0, atol=close * size, equal_nan=True)


def _no_features(model: Network) -> InputError:
    return InputError(
        f"model.name: the logits of {model.spec.name!r} are not a linear map of one vector per row, so that it has no "
        "features before a head: expected another model, or a method and an adaptation that train through the entire "
        "model, such as fedavg with lora or full"
    )
