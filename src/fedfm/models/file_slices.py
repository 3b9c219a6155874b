"""A module whose weights are still in the files, and the parts of these weights that a process reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedfm.errors import InputError
from fedfm.models.heads import within
from fedfm.models.quantised import Unquantised

if TYPE_CHECKING:
    from fedfm.models.hub_tools import Loaded


def slices_of(loaded: Loaded, name: str, *, needed: bool) -> FileSlices | None:
    """The slices of a module without values; None if its files are quantised and no slices are ``needed``.

    Raises:
        InputError: as :class:`FileSlices`.
    """
    return FileSlices(loaded, name) if needed or isinstance(loaded.stored, Unquantised) else None


class FileSlices:
    """The parameters of a module that have no values yet, and their values in the files.

    Attributes:
        names: their names in the module without an adapter, by parameter.

    Raises:
        InputError: the files do not have the module's tensors under the module's names.
    """

    def __init__(self, loaded: Loaded, name: str) -> None:
        if not loaded.hollow or not isinstance(loaded.stored, Unquantised):
            raise InputError(
                f"model.name: {name!r} cannot be read in parts: its files do not have the module's tensors under "
                "the module's own names, or are quantised; one process has to load it whole",
                key="model.name",
            )
        module: Any = loaded.module
        self._weights = loaded.stored
        if self._weights.differ(getattr(module, "all_tied_weights_keys", {})):
            module.config.tie_word_embeddings = False  # as transformers does
        else:
            module.tie_weights()  # as in the complete module: placeholders are made one by one
        made = tuple(loaded.new)
        self.names: dict[nn.Parameter, str] = {
            p: path for path, p in module.named_parameters() if not any(within(path, new) for new in made)
        }
        with torch.no_grad():
            for path, buffer in module.named_buffers():
                if path in self._weights and path not in self._weights.missing:
                    buffer.copy_(self._weights[path])

    def read(self, p: nn.Parameter, rows: slice | None = None) -> Tensor:
        """The values of a parameter in its own dtype, or of some of its rows (its entries along the first axis)."""
        name = self.names[p]
        return (self._weights[name] if rows is None else self._weights.part(name, rows)).to(p.dtype)
