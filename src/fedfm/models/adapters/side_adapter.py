"""Low-rank side adapters: a chain of small maps that reads only the block outputs of a frozen transformer.

BlindFed, Section 3.3, equations 4 to 6 (after LoSA: Time-, Memory-, and Parameter-Efficient Visual Adaptation, Mercea,
Gritsenko, Schmid, Arnab. arXiv:2402.02887). From the block outputs b_1 ... b_L the adapters compute

    h_0 = b_L,   h_l = g_l(b_l + h_{l-1}) + h_{l-1},   g_l(z) = alpha W_u GELU(W_d z).

A linear head reads the first position of h_L, here after a LayerNorm without parameters. No gradient passes through
the transformer, so a row's block outputs are computed once. For P > 1 disclosed positions, LoSA's token mixer follows:
with Z = B_l + H_{l-1} and G = g_l(Z), H_l = G + alpha V_u GELU(V_d (Z + G)) + H_{l-1}.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedfm import seeds
from fedfm.core.rows import Batch, Rows
from fedfm.errors import InputError
from fedfm.linalg.params import to_bytes
from fedfm.models import derived_modules
from fedfm.models.families import Parts
from fedfm.models.model import Model
from fedfm.models.preprocessors import Tools
from fedfm.models.spec import AdaptationSpec, ModelSpec

CHUNK = 256  # number of rows whose block outputs are in memory at the same time
STATES = "states"  # tensor of encoded rows, (n, L, P, d)
_PROBES = 32  # number of noise images that set the scales of a model without stored scales


def with_numbers(states: Tensor) -> Tensor:
    """Mask (n,) of the valid rows of disclosed activations (n, L, P, d). A row with a block of zeros is invalid."""
    return states.flatten(2).any(2).all(1)


class SideAdapter(nn.Module):
    """Adapters of L blocks and a linear head; the weights of all blocks are stacked.

    Args:
        blocks: number of blocks L.
        positions: number of disclosed positions P; the token mixer exists for P > 1.
        width: width d of an activation.
        rank: rank r of the adapters.
        classes: number of classes C.
    """

    def __init__(self, blocks: int, positions: int, width: int, rank: int, classes: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.zeros(blocks, rank, width))  # W_d
        self.up = nn.Parameter(torch.zeros(blocks, width, rank))  # W_u
        self.alpha = nn.Parameter(torch.ones(blocks))
        if positions > 1:
            self.mix_down = nn.Parameter(torch.zeros(blocks, rank, positions))  # V_d
            self.mix_up = nn.Parameter(torch.zeros(blocks, positions, rank))  # V_u
        self.head = nn.Linear(width, classes)
        self.shape = (blocks, positions, width)

    def draw(self, seed: int) -> SideAdapter:
        """Initialise: W_d ~ N(0, 1/d), V_d ~ N(0, 1/P), W_u = V_u = 0, alpha = min(1, 2/r), the head N(0, 0.02^2),
        bias 0.

        Alpha, like LoRA's scale, sets how fast the adapters learn in comparison with the head: with alpha = 1 and r = 8
        they overfit a few thousand rows. Every tensor has its own random stream, so that the values are the same on all
        machines.
        """
        _, positions, width = self.shape
        alpha = min(1.0, 2 / self.down.shape[1])
        spread = {"down": width**-0.5, "mix_down": positions**-0.5, "head.weight": 0.02}
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for name, parameter in self.named_parameters():
                torch.manual_seed(seeds.derive(seed, "adaptation", f"side_adapter.{name}"))
                if name in spread:
                    parameter.normal_(0.0, spread[name])
                else:
                    parameter.fill_(alpha if name == "alpha" else 0.0)
        return self

    def last_states(self, states: Tensor) -> Tensor:
        """Block outputs (b, L, P, d) -> h_L (b, P, d)."""
        h = states[:, -1]
        for level in range(states.shape[1]):
            z, alpha = states[:, level] + h, self.alpha[level]
            g = alpha * F.linear(F.gelu(F.linear(z, self.down[level])), self.up[level])
            if states.shape[2] > 1:
                mixed = torch.matmul(self.mix_up[level], F.gelu(torch.matmul(self.mix_down[level], z + g)))
                g = g + alpha * mixed
            h = g + h
        return h

    def forward(self, states: Tensor) -> Tensor:
        """Block outputs (b, L, P, d) -> logits (b, C)."""
        first = self.last_states(states)[:, 0]
        return self.head(F.layer_norm(first, first.shape[-1:]))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Release:
    """The linear map from a block's tokens to the disclosed activations.

    Attributes:
        positions: matrix (P, T) that combines the tokens.
        projection: matrix (d, p) that combines the features; None keeps all features.
    """

    positions: Tensor
    projection: Tensor | None = None

    def __call__(self, states: Tensor) -> Tensor:
        """Block outputs (..., T, d) -> (..., P, d), or (..., P, p) with a projection."""
        out = torch.matmul(self.positions, states)
        return out if self.projection is None else torch.matmul(out, self.projection)


def release(kind: str, tokens: int, grid: tuple[int, int], projection: Tensor | None = None) -> Release:
    """The map of this kind from a block's tokens to the disclosed activations; the last tokens are a grid of patches.

    ``class`` discloses the first token, or the mean over all tokens if all are patches. ``grid`` also discloses
    the means over the four quadrants of the grid. ``tokens`` discloses all tokens, projected.

    Raises:
        InputError: the grid has no quadrants.

    Example:
        >>> release("class", 4, (2, 2)).positions.tolist()
        [[0.25, 0.25, 0.25, 0.25]]
    """
    if kind == "tokens":
        return Release(torch.eye(tokens), projection)
    height, width = grid
    others = tokens - height * width
    first = torch.zeros(1, tokens)
    first[0, : 1 if others else tokens] = 1.0 if others else 1 / tokens
    if kind == "class":
        return Release(first)
    if min(grid) < 2:
        raise InputError(f'released = "grid": a grid of {height} x {width} patches has no quadrants; expected "class"')
    place = torch.arange(height * width).view(height, width)
    top, left = height // 2, width // 2
    rows = [first[0]]
    for part in (place[:top, :left], place[:top, left:], place[top:, :left], place[top:, left:]):
        row = torch.zeros(tokens)
        row[others + part.reshape(-1)] = 1 / part.numel()
        rows.append(row)
    return Release(torch.stack(rows))


def projection_of(module: nn.Module, width: int, to: int) -> Tensor:
    """The model's projection (d, p), entries N(0, 1/p); its seed is a hash of the weights, which only the owner has."""
    digest = hashlib.sha256(b"fedfm side adapter: projection\n")
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(name.encode() + to_bytes(tensor.detach().cpu().contiguous()))
    rng = np.random.Generator(np.random.PCG64(int.from_bytes(digest.digest(), "little")))
    return torch.from_numpy((rng.standard_normal((width, to)) / to**0.5).astype(np.float32))


class SideModel(Model):
    """Side adapters and a head on disclosed activations; only the adapters and the head are trained and sent.

    Attributes:
        backbone: the frozen transformer; None at a client that only gets disclosed activations.
        released: the map from a block's tokens to the values that the adapters read.
        scales: (L,), divisors of the block outputs.
        ranges: (L,), only for a polynomial student: bounds of the disclosed values. They hold for a row if all
            arguments of the student's polynomials stay inside their intervals.
    """

    def __init__(
        self,
        net: SideAdapter,
        *,
        spec: ModelSpec,
        classes: Sequence[str],
        tools: Tools | None = None,
        fingerprint: str = "",
        backbone: Model | None = None,
        released: Release | None = None,
        scales: Tensor | None = None,
        ranges: Tensor | None = None,
    ) -> None:
        super().__init__(
            net,
            spec=spec,
            task="classification",
            classes=classes,
            parts=Parts(None, (), None, None, "head"),
            tools=tools or Tools(),
            fingerprint=fingerprint,
            head=net.head,
        )
        self.net, self.backbone, self.released, self.scales, self.ranges = net, backbone, released, scales, ranges

    @property
    def frozen_parts(self) -> tuple[Model, Release, Tensor]:
        """Backbone, release and scales.

        Raises:
            ValueError: this model has no backbone.
        """
        if self.backbone is None or self.released is None or self.scales is None:
            raise ValueError("only the model's owner can compute its states")
        return self.backbone, self.released, self.scales

    def encode(self, rows: Rows) -> Rows:
        """The disclosed activations of the rows, computed once."""
        if STATES in rows.tensors:
            return rows
        return Rows({STATES: self.states(rows)}, labels=rows.labels)

    def states(self, rows: Rows) -> Tensor:
        """Disclosed activations (n, L, P, d), divided by their scales, on the CPU.

        A row beyond a student's ranges has only zeros, and no answer (:meth:`outputs`).

        Raises:
            ValueError: this model has no backbone.
        """
        backbone, released, scales = self.frozen_parts
        done = [torch.zeros(0, *self.net.shape)]
        for start in range(0, len(rows), CHUNK):
            part = rows.take(range(start, min(start + CHUNK, len(rows))))
            levels = torch.stack(backbone.blocks(part)[1:], 1)  # (n, L, T, d)
            done.append(self.within_ranges(released(levels / scales[:, None, None])))
        return torch.cat(done)

    def within_ranges(self, states: Tensor, unit: Tensor | float = 1.0) -> Tensor:
        """The states (n, L, P, d), with zeros for rows beyond a polynomial student's ranges.

        Args:
            unit: factor that converts the ranges to the unit of the states: a number for all blocks, or (L,) with one
                for each block. It is 1 for states that are divided by their scales.
        """
        if self.ranges is None:
            return states
        near = (states.abs().amax((2, 3)) <= self.ranges * unit).all(1)
        return torch.where(near[:, None, None, None], states, 0.0)

    def blocks(self, rows: Rows) -> list[Tensor]:
        """The backbone's block outputs (see :meth:`Model.blocks`)."""
        return self.frozen_parts[0].blocks(rows)

    def outputs(self, batch: Batch) -> Tensor:
        """Logits (b, C). Outside training, a row without activations has -inf for every class: it has no answer."""
        if STATES not in batch:
            inputs = {name: x for name, x in batch.items() if name != "labels"}
            batch = {STATES: self.states(Rows(inputs))}
        logits = super().outputs(batch)
        if torch.is_grad_enabled():
            return logits
        return logits.masked_fill(~with_numbers(batch[STATES]).to(logits.device)[:, None], -torch.inf)


def of_states(blocks: int, positions: int, width: int, rank: int, classes: Sequence[str]) -> SideModel:
    """The model of a client that only gets disclosed activations; its weights come from the server."""
    net = SideAdapter(blocks, positions, width, rank, len(classes))
    spec = ModelSpec("released-states", task="classification", adaptation=AdaptationSpec("side_adapter", rank=rank))
    return SideModel(net, spec=spec, classes=classes)


def disclosed_projection(module: nn.Module, spec: ModelSpec, width: int) -> Tensor | None:
    """The projection of tokens with so many values, if tokens are disclosed.

    Raises:
        InputError: it is wider than a token.
    """
    adapt = spec.adaptation or AdaptationSpec("side_adapter")
    if adapt.released != "tokens":
        return None
    if adapt.projection > width:
        raise InputError(
            f'released = "tokens", projection = {adapt.projection}: {spec.name!r} has {width} values per token; '
            f"expected at most {width}"
        )
    return projection_of(module, width, adapt.projection)


def around(
    module: nn.Module,
    spec: ModelSpec,
    parts: Parts,
    *,
    classes: Sequence[str],
    tools: Tools,
    fingerprint: str,
    seed: int,
) -> SideModel:
    """Side adapters next to a frozen vision transformer.

    Raises:
        InputError: the model is not an image transformer, or the projection is wider than its tokens.
    """
    adapt = spec.adaptation or AdaptationSpec("side_adapter")
    where = f'model.adaptation.name = "side_adapter": {spec.name!r}'
    side, patch = (_pair(getattr(getattr(module, "config", None), key, None)) for key in ("image_size", "patch_size"))
    if side is None or patch is None or not parts.blocks:
        raise InputError(f"{where} is not a transformer of image patches; use lora or head")
    module.requires_grad_(False)
    frozen = dataclasses.replace(spec, adaptation=AdaptationSpec("head"))
    backbone = Model(
        module,
        spec=frozen,
        task="classification",
        classes=classes,
        parts=parts,
        tools=tools,
        fingerprint=fingerprint,
        head=None,
    )
    grid = side[0] // patch[0], side[1] // patch[1]
    levels = backbone.blocks(_probes(side))[1:]
    tokens, width = levels[0].shape[1:]
    if tokens < grid[0] * grid[1] or any(b.shape[1:] != (tokens, width) for b in levels):
        raise InputError(f"{where} has blocks of unequal shapes; use lora or head")
    projection = disclosed_projection(module, spec, width)
    released = release(adapt.released, tokens, grid, projection)
    scales, ranges = torch.stack([b.square().mean().sqrt() for b in levels]), None
    if derived_modules.is_derived(module):
        scales, ranges = stored_scales(module, projection)
    shape = len(levels), len(released.positions), width if projection is None else projection.shape[1]
    net = SideAdapter(*shape, adapt.rank, len(classes)).draw(seed)
    device = next(module.parameters()).device
    return SideModel(
        net.to(device),
        spec=spec,
        classes=classes,
        tools=tools,
        fingerprint=fingerprint,
        backbone=backbone,
        released=released,
        scales=scales,
        ranges=ranges,
    )


def stored_scales(module: nn.Module, projection: Tensor | None) -> tuple[Tensor, Tensor]:
    """What a polynomial student has stored of its blocks (L,): root mean squares on its distillation data, and the
    largest disclosed values as multiples of them.
    """
    table = derived_modules.table(module)["blocks"]
    scales, ranges = (torch.tensor([entry[key] for entry in table]) for key in ("scale", "range"))
    return scales, ranges / scales * (1.0 if projection is None else projection.abs().sum(0).max())


def _probes(side: tuple[int, int]) -> Rows:
    """Images of white noise that are the same on all machines."""
    rng = seeds.generator(0, "side_adapter", "probes")
    return Rows({"pixel_values": torch.from_numpy(rng.standard_normal((_PROBES, 3, *side)).astype(np.float32))})


def _pair(value: object) -> tuple[int, int] | None:
    if isinstance(value, int):
        return value, value
    if isinstance(value, (list, tuple)) and len(value) == 2:
        return int(value[0]), int(value[1])
    return None
