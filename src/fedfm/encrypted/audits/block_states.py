"""States (block outputs) in a BlindFed run, for audits: for one client's rows, or for rows that no client has."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedfm import seeds
from fedfm.core.client import ClientId
from fedfm.core.rows import Rows
from fedfm.data.table import Table
from fedfm.encrypted.audits.photographs import two_photographs
from fedfm.encrypted.blindfed import BlindFed
from fedfm.encrypted.protocol.text_rows import embed_ids
from fedfm.encrypted.student.folding import block_states, patches_of
from fedfm.encrypted.student.text_places import embedding_tables
from fedfm.errors import RunError
from fedfm.models.adapters.side_adapter import SideModel
from fedfm.models.adapters.side_texts import PLACES, text_places
from fedfm.models.locate import locate
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.run_directory import Run

MOST, OTHERS = 1000, 300  # largest number of rows of a client, and number of rows that no client has
_AT_ONCE = 128


@dataclass(frozen=True)
class States:
    """The states of n rows.

    Attributes:
        patches: (n, T, F), the client's input, which it encrypts.
        blocks: (n, L, T, d), the outputs of all blocks.
        released: (n, L, P, d'), the part of the states that the protocol discloses, divided by the blocks' scales.
        labels: (n,), or None if the rows have no labels.
    """

    patches: Tensor
    blocks: Tensor
    released: Tensor
    labels: Tensor | None

    def __len__(self) -> int:
        return len(self.patches)

    def take(self, index: slice) -> States:
        """Return the states of some of the rows."""
        labels = None if self.labels is None else self.labels[index]
        return States(self.patches[index], self.blocks[index], self.released[index], labels)


def texts_unread(run: Run) -> str | None:
    """Say that an audit reads images, if the run's rows are texts; None otherwise."""
    place = locate(run.experiment.method_as(BlindFed).foundation)
    file = place / "config.json" if isinstance(place, Path) else None
    if file is None or not file.exists() or PLACES not in json.loads(file.read_text(encoding="utf-8")):
        return None
    return "it reads images, and this run has texts"


def client_input(model: SideModel, rows: Rows) -> np.ndarray:
    """Return what a client encrypts of its rows: (n, T, F), patches of images or embedded tokens and their mask."""
    module = model.frozen_parts[0].module
    batch = next(iter(replace(rows, labels=None).batches(len(rows))))
    if not text_places(module):
        return patches_of(module)(batch["pixel_values"]).double().numpy()
    return embed_ids(batch["input_ids"], batch["attention_mask"].sum(1), embedding_tables(module)).numpy()


def side_model(population: Partitioned) -> SideModel:
    """Return the server's model of a BlindFed run."""
    model = population.model
    if not isinstance(model, SideModel):
        raise RunError("the population has no model with released states")
    return model


def largest_client(population: Partitioned) -> ClientId:
    """Return the client with the most training rows."""
    rows = population.federated.clients
    return max(sorted(rows), key=lambda c: len(rows[c].train))


def of_client(population: Partitioned, client: ClientId, part: str, seed: int) -> States:
    """Compute states of a client's ``train`` or ``test`` rows, in random order, for at most :data:`MOST` rows."""
    index = getattr(population.federated.clients[client], part)
    index = seeds.generator(seed, "audit", "block_states", client, part).permutation(index)[:MOST]
    return _states(population, population.federated.table, index)


def of_photographs(population: Partitioned, seed: int) -> States:
    """Compute states of squares from the two photographs in scikit-learn, which are not rows of any client."""
    rng = seeds.generator(seed, "audit", "photographs")
    photographs = two_photographs()
    cut = []
    for _ in range(OTHERS):
        photograph = photographs[rng.integers(len(photographs))]
        side = int(rng.integers(48, 200))
        y, x = (int(rng.integers(size - side)) for size in photograph.shape[:2])
        cut.append(np.asarray(Image.fromarray(photograph[y : y + side, x : x + side]).resize((64, 64))))
    classes = population.federated.table.classes
    table = Table("image", np.stack(cut), None, classes, np.full(OTHERS, "test"))
    return _states(population, table, np.arange(OTHERS))


def _states(population: Partitioned, table: Table, index: np.ndarray) -> States:
    model = side_model(population)
    backbone, _, _ = model.frozen_parts
    rows = model.prepare(table, index).compute()
    patch, done = patches_of(backbone.module), []
    with torch.no_grad():
        for pixels in torch.split(rows.tensors["pixel_values"], _AT_ONCE):
            done.append((patch(pixels), block_states(backbone.module, pixels)))
    patches, blocks = (torch.cat(parts) for parts in zip(*done, strict=True))
    return States(patches, blocks, model.states(rows), rows.labels)
