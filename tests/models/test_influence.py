"""Which tokens an output depends on, by gradients."""

import torch
from torch import nn

from fedfm.models import influence


class Scaled(nn.Module):
    """Scales its embeddings in place, as CTRL does, and adds up those up to each place."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states = self.table(ids)
        states *= 3.0
        return states.cumsum(1)


def test_embeddings_that_are_changed_in_place_are_followed():
    model, ids = Scaled(), torch.tensor([[0, 1, 2, 3]])
    (mask,) = influence.of_places(model, lambda: model(ids)[0, 1])
    assert mask.tolist() == [[True, True, False, False]]
    assert influence.of_last(model, lambda: model(ids)[0, 2]) is False
    assert influence.of_last(model, lambda: model(ids)[0, 3]) is True
