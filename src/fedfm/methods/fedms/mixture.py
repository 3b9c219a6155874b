"""The two experts of FedMS on one client's rows, and their mixture (equation 6)."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, finalize

import numpy as np
import torch
from torch import Tensor

from fedfm.core.checks import match
from fedfm.core.rows import Rows
from fedfm.linalg.out_of_core import limit
from fedfm.linalg.params import Params
from fedfm.methods.fedms.gate import TRUNK, Gating, adapter_of, trunk_of
from fedfm.models.adapters.merged import merge
from fedfm.models.adapters.pair_names import GATE, GLOBAL, LOCAL
from fedfm.models.backbone import backbone
from fedfm.models.dual_encoder import (
    DualModel,
    boundary_images,
    boundary_texts,
    images_with_states,
    install,
    top_images,
    top_texts,
    trunk_images,
)
from fedfm.models.layers import layers
from fedfm.models.model import Model

PIECE = 64  # rows scored at a time


class FileRows:
    """Rows (n, ...) in an unnamed file. They use memory only while they are read."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        finalize(self, self._file.close)
        self.nbytes, self._like = 0, torch.zeros(0)

    def append(self, rows: Tensor) -> bool:
        """Append these rows (b, ...); returns false if the disk is full."""
        self._like, data = rows[:1].clone(), rows.contiguous().view(torch.uint8).numpy().tobytes()
        self.nbytes += rows.nbytes
        with suppress(OSError):
            return self._file.write(data) == rows.nbytes
        return False

    def __getitem__(self, index: Sequence[int] | np.ndarray) -> Tensor:
        out = torch.empty(len(index), *self._like.shape[1:], dtype=self._like.dtype)
        size, flat = self._like.nbytes, out.view(torch.uint8).view(len(index), -1).numpy()
        for row, i in zip(flat, index, strict=True):
            os.preadv(self._file.fileno(), [row], int(i) * size)
        return out


@dataclass
class Known:
    """The global expert's outputs for some rows.

    Attributes:
        V_g: features of the images, (n, d); empty until ``states`` has an entry.
        states: for each k, the images' hidden states (n, T, h) below the top k blocks, or None if they did not fit.
    """

    W_g: Params
    V_g: Tensor = field(default_factory=lambda: torch.zeros(0))
    states: dict[int, FileRows | None] = field(default_factory=dict)


# Two caches for each model: the global expert's outputs for sets of images, with the hash of a set's images as key,
# and the global expert's outputs for the texts.
_rows: WeakKeyDictionary[DualModel, dict[bytes, Known]] = WeakKeyDictionary()
_texts: WeakKeyDictionary[DualModel, tuple[Params, dict[int, tuple[Tensor, Tensor]]]] = WeakKeyDictionary()


class Experts:
    """The cosines of both experts on one client's rows.

    The frozen global expert's outputs are computed once and reused in later rounds. The outputs are the features, and
    the hidden states below the top k blocks, which are equal for both experts. Files of at most ``FEDFM_MEMORY`` bytes
    hold the states. States that do not fit are computed again for every batch, with the same bits.
    """

    def __init__(self, model: DualModel, W_g: Params, rows: Rows, k: int, gate_backbone: str = "") -> None:
        self.model, self.k, self.W_g, self.rows = model, k, W_g, rows
        every, key = _rows.setdefault(model, {}), _fingerprint(rows)
        found = every.pop(key, None)
        # Insert the entry anew, so that entries are in the order of their last use.
        self.known = every[key] = found if found and _equal(found.W_g, W_g) else Known(W_g)
        self.texts, self.T_g = _of_texts(model, W_g, k)
        named = backbone(gate_backbone, str(model.device)) if gate_backbone else None
        self.described = named.features(rows, model) if named else None  # (n, width of the backbone's features)
        if k not in self.known.states:
            self._fill()

    def _fill(self) -> None:
        V_g, filed = list[Tensor](), None
        with install(self.model, self.W_g), merge(self.model):
            for V, states in images_with_states(self.model, self.rows, self.k):
                if not V_g and self._room(states[0].nbytes * len(self.rows)):
                    filed = FileRows()
                if filed is not None and not filed.append(states):
                    filed = None
                V_g.append(V)
        self.known.V_g = torch.cat(V_g) if V_g else torch.zeros(0, self.model.dual.width)
        self.known.states[self.k] = filed

    def _room(self, nbytes: int) -> bool:
        """Make room for this number of bytes by removing the oldest files; returns whether the bytes then fit."""
        held = [known.states for known in _rows[self.model].values()]
        total = nbytes + sum(map(_nbytes, held))
        for states in held:
            if total > limit():
                total -= _nbytes(states)
                states.clear()
        return total <= limit()

    def _below(self, index: np.ndarray, k: int) -> Tensor:
        """The images' states below the top k blocks, (b, T, h)."""
        if (filed := self.known.states.get(k)) is not None:
            return filed[index]
        with install(self.model, self.W_g), merge(self.model):
            return boundary_images(self.model, self.rows.take(index), k)

    def of_global(self, index: np.ndarray) -> Tensor:
        """V_g of these rows, (b, d)."""
        return self.known.V_g[index].to(self.model.device)

    def gate_input(self, index: np.ndarray, trunk: Mapping[str, Tensor]) -> Tensor:
        """The gate adapter's inputs for these rows, (b, d): V_g, or the outputs of the gate's own trunk or backbone."""
        if self.described is not None:
            return self.described[index].to(self.model.device)
        if not trunk:
            return self.of_global(index)
        named = {n.removeprefix(TRUNK): t for n, t in trunk.items()}
        return trunk_images(self.model, self.W_g, named, self._below(index, 1))

    def cosines(self, index: np.ndarray, *, train: bool) -> tuple[Tensor, Tensor]:
        """Cosines <V_g, T_g> and <V_i, T_i>, (b, C) each. The model must have the local expert loaded."""
        below = self._below(index, self.k)
        with merge(self.model):
            V_i = top_images(self.model, below, self.k, train=train)
            T_i = top_texts(self.model, self.texts, self.k, train=train)
        return self.of_global(index) @ self.T_g.T, V_i @ T_i.T


def _nbytes(states: Mapping[int, FileRows | None]) -> int:
    return sum(filed.nbytes for filed in states.values() if filed is not None)


def _fingerprint(rows: Rows) -> bytes:
    """A hash of the images."""
    digest = hashlib.sha256()
    for batch in rows.batches(256):
        digest.update(batch["pixel_values"].contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.digest()


def _of_texts(model: DualModel, W_g: Params, k: int) -> tuple[Tensor, Tensor]:
    """The prompts' states below the top k blocks (P, C, L, h), and T_g (C, d); both are the same for all clients."""
    found = _texts.get(model)
    if found is None or not _equal(found[0], W_g):
        found = _texts[model] = (W_g, {})
    if k not in found[1]:
        with install(model, W_g), merge(model):
            found[1][k] = boundary_texts(model, k), model.dual.encode_texts()
    return found[1][k]


def _equal(a: Params, b: Params) -> bool:
    return a is b or (a.layout == b.layout and all(torch.equal(t, b.flats[d]) for d, t in a.flats.items()))


def differing_layers(model: Model, W_g: Params, W_i: Params) -> int:
    """The smallest k such that the experts differ only in the top k layers; the states below these layers are equal."""
    encoders = model.parts.encoders
    changed = {
        layer for layer, names in layers(model, "layer").items() if any(bool((W_g[n] != W_i[n]).any()) for n in names)
    }
    depths = [len(blocks) - i for blocks in encoders for i, (path, _) in enumerate(blocks) if path in changed]
    return max(depths, default=1)


def mix(lam: Tensor, of_g: Tensor, of_i: Tensor) -> Tensor:
    """O of equation 6: lambda <V_g, T_g> + (1 - lambda) <V_i, T_i>, for lambda (b,) and cosines (b, C)."""
    return lam[:, None] * of_g + (1 - lam)[:, None] * of_i


def is_mixture(w: Params) -> bool:
    """Whether ``w`` has both experts and a gate, rather than one expert."""
    return any(name.startswith(f"{GATE}/") for name in w)


def check_mixture(w: Params, model: DualModel, gating: Gating) -> None:
    """Refuse experts and a gate with wrong layouts.

    Raises:
        ClientFault: a tensor differs; the fault names the first such tensor.
    """
    for part in (GLOBAL, LOCAL):
        match(w.part(part), model.layout, part)
    match(adapter_of(w.part(GATE)), gating.initial(model, 0).layout, GATE)


def mixture_logits(model: DualModel, w: Params, rows: Rows, gating: Gating) -> Tensor:
    """Logits S O of equation 6, (n, C), from the experts and the gate in w."""
    W_g, W_i = w.part(GLOBAL), w.part(LOCAL)
    k = differing_layers(model, W_g, W_i)
    Z, done, both = w.part(GATE), list[Tensor](), Experts(model, W_g, rows, k, gating.backbone)
    gate = gating.load(model, Z).eval()
    trunk = trunk_of(Z, model.device)
    model.load(W_i)
    for start in range(0, len(rows), PIECE):
        piece = np.arange(start, min(start + PIECE, len(rows)))
        with torch.no_grad():
            lam = gating.lam(gate, both.gate_input(piece, trunk))
            of_g, of_i = both.cosines(piece, train=False)
            done.append((model.dual.scale * mix(lam, of_g, of_i)).float().cpu())
    return torch.cat(done) if done else torch.zeros(0, len(model.classes))
