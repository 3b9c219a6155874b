"""Generate answers to conversations with images, from prompts that are padded on the left."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fedfm.models import text_metrics
from fedfm.tasks import _image_arguments, _image_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from fedfm.core.rows import Rows
    from fedfm.models.network import Network


def answers(model: Network, rows: Rows) -> list[text_metrics.Answer]:
    """The model's greedy answers; they do not depend on the rows' reference answers."""
    found = [_image_tokens.prompt((row[0], row[1], row[2]), model.tools) for row in rows.pairs or ()]  # type: ignore[misc]
    asked = [torch.from_numpy(ids).long() for ids, _ in found]

    def more(some: list[int], length: int) -> dict[str, Tensor]:
        """The arguments that contain the images of these rows, and the arguments (b, length) with a value per token."""
        part = rows.take(some)
        names = [name for name in part.tensors if name.endswith(_image_arguments.SHAPE)]
        batch = {name: part.tensors[name] for name in names} | {n: of.compute() for n, of in part.deferred.items()}
        made = _image_arguments.for_model(batch)
        for name in rows.token_arguments:
            made[name] = torch.zeros(len(some), length, dtype=torch.int64)
            for row, i in enumerate(some):
                values = found[i][1].get(name, found[i][0][:0])
                made[name][row, length - len(asked[i]) : length - len(asked[i]) + len(values)] = torch.from_numpy(
                    values
                )
        return {name: x.to(model.device) for name, x in made.items()}

    return text_metrics.answers(model, rows, asked=asked, more=more)
