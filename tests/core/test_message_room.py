"""A message may be as large as the receiver's model lets it expect: declared layouts, no gigabytes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedfm.aggregation.base import Aggregator
from fedfm.core.messages import Request
from fedfm.core.wire import codec, limits, payload
from fedfm.engines.flower.message_codec import InFlight, reply_of
from fedfm.engines.flower.private_api import over_the_wire
from fedfm.engines.local.engine import LocalLink
from fedfm.errors import ClientFault
from fedfm.linalg.params import Params, layout_of
from fedfm.methods.fedavg import FedAvg
from fedfm.runtime.client import Silos
from toy import Quadratic, Toys


def test_the_room_follows_the_layout() -> None:
    eight_billion = layout_of((("w", torch.float32, (8, 10**9)),))  # 32 GB, of which nothing is allocated
    assert eight_billion.nbytes == 32 * 10**9
    limits.check_size("{}", 3 * eight_billion.nbytes, limits.room(eight_billion))
    with pytest.raises(ClientFault, match="E_SIZE"):
        limits.check_size("{}", 3 * eight_billion.nbytes)
    with pytest.raises(ClientFault, match="E_SIZE"):
        limits.check_size("{}", 40 * eight_billion.nbytes, limits.room(eight_billion))


class Wide(Quadratic):
    """A model with a layout that is larger than its tensors: what it says counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layout = layout_of((("w", torch.float32, (1000,)),))


def silos(model: Any, folder: Path) -> Silos:
    toys = Toys({"a": [1.0], "b": [2.0]})
    toys.client_model = model
    return Silos(FedAvg(), Aggregator(), toys, memory=folder)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BYTES", 10)
    monkeypatch.setattr(limits, "VECTORS", 2)


REQUESTS = [
    Request(c, "train.FedAvg_train", {"w": Params({"w": torch.ones(n)})}, 1, 1) for c, n in (("a", 1500), ("b", 2500))
]


@pytest.mark.usefixtures("tiny")
def test_the_local_engine_takes_what_fits_the_layout(tmp_path: Path) -> None:
    here = silos(Wide(), tmp_path)
    assert here.room == 10 + 2 * 4000
    taken = over_the_wire(here, REQUESTS[:1])
    assert "E_SIZE" not in str(taken[0])
    with pytest.raises(ClientFault, match="E_SIZE"):
        over_the_wire(here, REQUESTS[1:])


@pytest.mark.usefixtures("tiny")
def test_a_worker_s_reply_takes_what_fits_the_layout(tmp_path: Path) -> None:
    small = {"w": Params({"w": torch.ones(1)})}
    for model, fits in ((Wide(), True), (Quadratic(), False)):
        link = LocalLink(silos(model, tmp_path / str(fits)), workers=2)
        try:
            replies = list(link.exchange([Request(c, "train.FedAvg_train", small, 1, 1) for c in "ab"]))
        finally:
            link.close()
        assert all(("E_SIZE" in str(reply.fault)) != fits for reply in replies)


@pytest.mark.usefixtures("tiny")
def test_flower_s_replies_take_what_fits_the_layout() -> None:
    value = codec.envelope(1, 1, Params({"w": torch.ones(1500)}))
    _, pieces = payload.encode(value)
    assert sum(map(len, pieces)) == 16 + 6000
    message = SimpleNamespace(has_error=lambda: False, has_content=lambda: True, content=codec.to_record(value))
    request = Request("a", "train.FedAvg_train", {}, 1, 1)
    layout = Wide().layout
    sent = InFlight(1, request, 0, 0)
    assert reply_of(message, sent, limits.room(layout))[0].fault is None  # type: ignore[arg-type]
    assert "E_SIZE" in str(reply_of(message, sent, None)[0].fault)  # type: ignore[arg-type]
