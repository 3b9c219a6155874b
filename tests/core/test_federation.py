"""The server's view: who is left out and why, whatever a link delivers; sums in order of names, whatever the timing."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedfm.aggregation.base import Aggregator
from fedfm.core.checks import conform, nonfinite
from fedfm.core.client import Client, Update, each, on_client
from fedfm.core.federation import Federation
from fedfm.core.messages import Reply, Request
from fedfm.errors import ClientFault, RunError
from fedfm.linalg.params import Params
from fedfm.methods.fedavg import FedAvg
from toy import Quadratic


def update(x: float, weight: float = 1.0) -> Update:
    return Update(Params({"w": torch.tensor([x])}), weight)


class Script:
    """A link that delivers what the test says."""

    def __init__(self, replies, clients=("a", "b", "c")):
        self.clients, self.replies, self.requests = clients, replies, []

    def exchange(self, requests: Sequence[Request]) -> Iterator[Reply]:
        self.requests += requests
        for make in self.replies:
            yield make(requests[0].round, requests[0].call)


def ok(client, x, weight=1.0):
    return lambda r, c: Reply(client, update(x, weight), r, c, 10, 20)


def raw(client, value):
    return lambda r, c: Reply(client, value, r, c, 10, 20)


def fault(client, code="E_EXCEPTION", reason="ValueError: no"):
    return lambda r, c: Reply(client, None, r, c, 10, 0, ClientFault(code, reason))


def mean_of(replies, min_clients=1, clients=("a", "b", "c")):
    fed = Federation(Script(replies, clients), model=Quadratic(), min_clients=min_clients, aggregator=Aggregator())
    fed.begin(4)
    method = FedAvg()
    return fed, float(fed.mean(method.train, w=fed.initial)["w"])


def test_all_well():
    fed, mean = mean_of([ok("a", 1.0), ok("b", 3.0), ok("c", 5.0, 2.0)])
    assert mean == pytest.approx(3.5)
    assert not fed.excluded
    assert (fed.transcript.bytes_down, fed.transcript.bytes_up) == (30, 60)


def params(**tensors):
    return Params({name: torch.tensor(v) for name, v in tensors.items()})


BAD = {
    "E_EXCEPTION": fault("b"),
    "E_DIED": fault("b", "E_DIED", "its process was ended"),
    "E_TENSORS": raw("b", Update(params(v=[1.0]), 1.0)),
    "E_SHAPE": raw("b", Update(params(w=[[1.0]]), 1.0)),
    "E_DTYPE": raw("b", Update(Params({"w": torch.ones(1, dtype=torch.float64)}), 1.0)),
    "E_NONFINITE": raw("b", Update(params(w=[float("nan")]), 1.0)),
    "E_NORM": raw("b", Update(params(w=[3e38]), 1e9)),
    "E_FIELD": raw("b", {"delta": params(w=[1.0])}),
    "E_WEIGHT": raw("b", {"delta": params(w=[1.0]), "weight": -1.0}),
    "E_TIMEOUT": lambda r, c: Reply("zz", None, r, c),
}


@pytest.mark.parametrize("code", BAD)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_bad_client_is_left_out_and_the_mean_is_that_of_the_others(code, place):
    replies = [ok("a", 1.0), ok("c", 5.0, 2.0)]
    replies.insert(place, BAD[code])
    fed, mean = mean_of(replies)
    assert mean == pytest.approx((1.0 + 2 * 5.0) / 3)
    left_out = {e.client: e for e in fed.excluded}
    assert left_out["b"].code == code
    assert left_out["b"].round == 4
    assert left_out["b"].reason


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_metrics_must_be_finite_too(value):
    fed, _ = mean_of([ok("a", 1.0), raw("b", {"delta": params(w=[1.0]), "weight": 1.0, "metrics": {"loss": value}})])
    assert {e.client for e in fed.excluded} == {"b", "c"}


@pytest.mark.parametrize(
    ("metrics", "code"),
    [
        ({"accuracy": 1.0}, "E_FIELD"),
        ({"loss": 0.1, "round": 9.0}, "E_FIELD"),
        ({"params_sha256": 0.0}, "E_FIELD"),
        ({f"m{i}": 0.0 for i in range(101)}, "E_SIZE"),
        ({"n" * 101: 0.0}, "E_SIZE"),
    ],
)
def test_metrics_that_nobody_notes_cost_their_client_the_round(metrics, code):
    bad = {"delta": params(w=[50.0]), "weight": 1.0, "metrics": metrics}
    fed, mean = mean_of([ok("a", 1.0), raw("b", bad), ok("c", 3.0)])
    assert mean == 2.0
    assert [(e.client, e.code) for e in fed.excluded] == [("b", code)]
    with pytest.raises(ClientFault, match=code):  # as the client's own half is told
        Update(params(w=[50.0]), 1.0, metrics)
    most = {"n" * 97 + f"{i:03}": 1.0 for i in range(100)}
    assert Update(params(w=[50.0]), 1.0, most).metrics == most


def test_a_reason_is_kept_short_whatever_a_client_has_put_into_it():
    value = Update(Params({"n" * 10**6: torch.tensor([1.0]), "w": torch.tensor([1.0])}), 1.0)
    fed, _ = mean_of([ok("a", 1.0), raw("b", value), ok("c", 3.0)])
    assert [e.code for e in fed.excluded] == ["E_TENSORS"]
    assert len(fed.excluded[0].reason) == 400


def test_late_duplicate_and_stray_replies_change_nothing():
    def late(r, c):
        return Reply("b", update(100.0), r - 1, c, 1, 1)

    def other_call(r, c):
        return Reply("b", update(100.0), r, c + 1, 1, 1)

    fed, mean = mean_of(
        [late, ok("b", 3.0), other_call, ok("a", 1.0), ok("b", 50.0), ok("c", 5.0), ok("stranger", 9.0)],
    )
    assert mean == pytest.approx(3.0)
    assert sorted((e.client, e.code) for e in fed.excluded) == [
        ("b", "E_DUPLICATE"),
        ("b", "E_DUPLICATE"),
        ("b", "E_ROUND"),
        ("stranger", "E_CLIENT"),
    ]


def test_a_client_that_answers_only_an_old_round_times_out():
    fed, mean = mean_of([ok("a", 1.0), lambda r, c: Reply("b", update(9.0), r - 1, c), ok("c", 3.0)])
    assert mean == pytest.approx(2.0)
    assert [(e.client, e.code) for e in fed.excluded] == [("b", "E_ROUND"), ("b", "E_TIMEOUT")]


def test_too_few_stop_the_run():
    with pytest.raises(RunError, match="1 of 3 clients"):
        mean_of([ok("a", 1.0), fault("b"), fault("c")], min_clients=2)
    with pytest.raises(RunError, match="0 of 3"):
        mean_of([])


def test_the_order_of_arrival_does_not_matter():
    values = {"a": 1e8, "b": 1.0, "c": -1e8}
    orders = [("a", "b", "c"), ("c", "b", "a"), ("b", "c", "a"), ("c", "a", "b")]
    means = {mean_of([ok(k, values[k], 0.1) for k in order])[1] for order in orders}
    assert len(means) == 1


def test_a_payload_can_differ_by_client():
    link = Script([ok("a", 0.0), ok("b", 0.0), ok("c", 0.0)])
    fed = Federation(link, model=Quadratic(), aggregator=Aggregator())
    fed.begin(1)
    fed.ask(FedAvg().train, w=each({"a": 1, "b": 2, "c": 3}), other=7)
    assert [(r.payload["w"], r.payload["other"]) for r in link.requests] == [(1, 7), (2, 7), (3, 7)]
    assert {r.handler for r in link.requests} == {"query.FedAvg_train"}


def test_ask_shows_single_replies_and_mean_does_not_say_so():
    link = Script([ok("a", 0.0), ok("b", 0.0), ok("c", 0.0)])
    fed = Federation(link, model=Quadratic(), aggregator=Aggregator())
    fed.begin(1)
    fed.mean(FedAvg().train, w=fed.initial)
    assert {r.handler for r in link.requests} == {"train.FedAvg_train"}
    assert {c.form for c in fed.transcript.pending} == {"plain"}


@dataclass(frozen=True)
class Sums(FedAvg):
    """A client half that tells numbers of every kind."""

    @on_client
    def tell(self, client: Client, w: Params) -> dict[str, Any]: ...

    @on_client
    def show(self, client: Client, w: Params) -> list[Tensor]: ...


ABSURD = {
    "float32": torch.tensor([3e38, -3e38]),  # whose sum is finite
    "float64": torch.tensor([1e30], dtype=torch.float64),
    "far beyond float32": torch.tensor([1e200], dtype=torch.float64),
    "bfloat16": torch.tensor([1e30], dtype=torch.bfloat16),
    "many": torch.full((100, 100), 1.1e13),
}
HONEST = {
    "counts": torch.tensor([1 << 62]),  # whole numbers are as large as they like
    "sums": torch.full((1000,), 9e14 / math.sqrt(1000), dtype=torch.float64),
    "a transposed matrix": torch.full((3, 2), 1e14).T,
    "nothing": torch.zeros(0),
    "float16": torch.full((8,), 65504.0, dtype=torch.float16),
}


@pytest.mark.parametrize(("handler", "as_params"), [("tell", True), ("tell", False), ("show", False)])
@pytest.mark.parametrize("name", ABSURD)
def test_a_finite_number_that_no_data_gives_leaves_its_client_out(handler, name, as_params):
    """Whatever the place, the dtype and the sign."""
    values = list(HONEST.values())

    def reply(tensors):
        named = {str(i): Params({"w": t}) if as_params else t for i, t in enumerate(tensors)}
        return named if handler == "tell" else tensors

    link = Script([raw("a", reply([*values, ABSURD[name]])), raw("b", reply(values)), fault("c")])
    fed = Federation(link, model=Quadratic(), aggregator=Aggregator())
    fed.begin(1)
    found = fed.ask(getattr(Sums(), handler), w=fed.initial)
    assert set(found) == {"b"}
    (left_out,) = [e for e in fed.excluded if e.client == "a"]
    assert left_out.code == "E_NORM"
    assert "is above 1e+15" in left_out.reason


def test_a_tensor_that_a_gradient_may_flow_to_is_checked_like_others():
    value = torch.ones(3, requires_grad=True)
    assert conform(value, torch.Tensor, most=2.0) is value
    with pytest.raises(ClientFault, match=r"L2 norm 1\.73 is above 1"):
        conform(value, torch.Tensor, most=1.0)


def test_no_accepted_reply_can_overflow_the_servers_sum_or_its_squares():
    """All of them at both limits, in float32."""
    worst = [ok(c, sign * 1e15, 1e9) for c, sign in (("a", 1), ("b", 1), ("c", 1))]
    fed, mean = mean_of(worst)
    assert not fed.excluded
    assert mean == pytest.approx(1e15, rel=1e-6)
    assert torch.isfinite(torch.tensor(mean).square())


def test_the_place_of_a_value_that_is_not_finite_is_named_in_any_state():
    inf, nan = float("inf"), float("nan")
    sound = {"n": 3, "w": params(w=[3e38, -3e38]), "c": {"a": [np.ones(2), torch.arange(3)], "b": (None, "inf")}}
    assert nonfinite(sound) is None
    assert nonfinite(sound | {"w": params(w=[nan])}, "state") == "state.w"
    assert nonfinite(sound | {"c": {"a": [1.0, np.array([1.0, inf])]}}, "state") == "state.c.a[1]"
    assert nonfinite([1, torch.tensor(nan)], "state") == "state[1]"
    assert nonfinite({"update": update(inf)}, "state") == "state.update.delta"
    assert nonfinite({"x": np.float32(inf)}) == ".x"


@pytest.mark.parametrize(("answers", "asked", "stops"), [(1, 2, False), (1, 3, True), (2, 3, False), (2, 4, False)])
def test_by_default_half_of_those_that_were_asked_have_to_answer(answers, asked, stops):
    names = "abcd"[:asked]
    replies = [ok(c, 1.0) if i < answers else fault(c) for i, c in enumerate(names)]
    if not stops:
        mean_of(replies, min_clients=None, clients=tuple(names))
        return
    with pytest.raises(RunError, match=rf"{answers} of {asked} clients .* {-(-asked // 2)} are needed"):
        mean_of(replies, min_clients=None, clients=tuple(names))
