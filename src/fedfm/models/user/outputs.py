"""The entries of a module's output for each row: named arrays, or only the logits."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedfm.errors import InputError, quote_names
from fedfm.models.batches import as_mapping, rows_of

_INSIDE = (
    "loss",
    "hidden_state",
    "hidden_states",
    "attentions",
    "past_key_values",
)  # internal values of the model, not its answer
_HOW = "give the module with an objective and logits=(module, batch) -> outputs"


@dataclass(frozen=True)
class Outputs:
    """The outputs of one batch.

    Attributes:
        arrays: the outputs (b, ...) by name; only "logits" for a classifier and for a module that returns one tensor.
        left_out: names of outputs without an entry for each row.
    """

    arrays: dict[str, Tensor]
    left_out: tuple[str, ...] = ()

    @property
    def logits(self) -> Tensor | None:
        """The only array; None if there are several."""
        return next(iter(self.arrays.values())) if len(self.arrays) == 1 else None

    @property
    def count(self) -> int:
        """b, the number of entries."""
        return len(next(iter(self.arrays.values())))

    def together(self) -> dict[str, Any]:
        """The arrays as lists, if all entries belong to one row, e.g. the two answers of a preference."""
        return {name: array.float().cpu().tolist() for name, array in self.arrays.items()}

    def rows(self, mask: Tensor | None) -> list[dict[str, Any]]:
        """The arrays of each row as lists; the entries of padding are left out of arrays with one entry per token.

        Args:
            mask: (b, L) 1 at tokens, 0 at padding.
        """
        found: list[dict[str, Any]] = [{} for _ in range(self.count)]
        for name, array in self.arrays.items():
            by_token = mask is not None and array.dim() > 1 and array.shape[:2] == mask.shape
            for i, row in enumerate(array.float().cpu()):
                kept = row[mask[i].cpu().bool()] if by_token and mask is not None else row
                found[i][name] = kept.tolist()
        return found


def forecasts(module: Any) -> bool:
    """Whether the module is an encoder-decoder that samples forecasts of a series with its own ``generate``.

    Such a ``generate`` does not write text token by token: the decoder's inputs are the values of the series.
    """
    both = getattr(getattr(module, "config", None), "is_encoder_decoder", False)
    return bool(both and hasattr(module, "generate") and hasattr(module, "can_generate") and not module.can_generate())


def forecast(module: Any, inputs: Mapping[str, Any]) -> Any:
    """Sampled forecasts. Inputs that ``generate`` does not take, such as the true values, are left out."""
    taken = inspect.signature(module.generate).parameters
    return module.generate(**{name: x for name, x in inputs.items() if name in taken})


def of_module(found: Any, batch: Mapping[str, Any]) -> Outputs:
    """The outputs in a module's return value for a batch.

    Raises:
        InputError: no output has an entry for each row.
    """
    if isinstance(found, Tensor):
        return Outputs({"logits": found})
    named = as_mapping(found)
    if named is None:
        raise InputError(f"the module gives a {type(found).__name__}: expected a tensor or named outputs; {_HOW}")
    count, arrays, left_out = rows_of(batch), {}, []
    for name, value in named.items():
        if str(name).endswith(_INSIDE) or value is None:
            continue
        if isinstance(value, Tensor) and value.dim() and len(value) == count:
            arrays[str(name)] = value
        else:
            left_out.append(str(name))
    logits = arrays.get("logits")
    if logits is not None and logits.dim() == 2:  # a classifier's logits
        return Outputs({"logits": logits})
    if not arrays:
        what = f"only {quote_names(left_out)}, which lack an entry for each row" if left_out else "no output"
        raise InputError(f"the module gives {what}; {_HOW}")
    return Outputs(arrays, tuple(left_out))
