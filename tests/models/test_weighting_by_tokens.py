"""A mean that weighs clients by the tokens that their loss counts."""

import numpy as np
import pytest
import torch
from tiny_models import load

from fedfm.core.client import Client, ClientData
from fedfm.core.rows import Rows
from fedfm.data.table import Table
from fedfm.errors import InputError
from fedfm.methods._weights import weight_of
from fedfm.models.wrap import wrap
from fedfm.training.scheduler import train_client

PAIRS = [("the quick brown fox", "jumps over"), ("a lazy dog", "birds sing the"), ("a", "fox")]


def client(model, rows):
    return Client("a", ClientData(lambda: rows, Rows, Rows), model, {}, 0, trainer=train_client)


def test_a_clients_weight_is_the_tokens_of_its_answers(folder):
    table = Table("instruction", PAIRS, None, (), np.full(3, "train"))
    model = load(folder("llama"), table, "lora")
    rows = model.prepare(table, range(3))
    spoken = sum(len(ids) - int(start) for ids, start in zip(rows.tokens, rows.tensors["answer_start"], strict=True))
    assert weight_of(client(model, rows), "tokens") == spoken == 9  # six words and three ends
    assert weight_of(client(model, rows), "size") == 3
    assert weight_of(client(model, rows), "uniform") == 1


def test_own_rows_mark_what_counts():
    model = wrap(torch.nn.Linear(2, 2), lambda module, batch: batch["labels"].float().mean())
    marked = Rows(
        {"input_ids": torch.ones(2, 3, dtype=torch.int64), "labels": torch.tensor([[-100, 1, 2], [-100, 1, -100]])}
    )
    assert weight_of(client(model, marked), "tokens") == 3
    with pytest.raises(InputError, match='weighting = "tokens": the rows have no tokens'):
        weight_of(
            client(model, Rows({"features": torch.ones(2, 2)}, labels=torch.zeros(2, dtype=torch.int64))), "tokens"
        )
