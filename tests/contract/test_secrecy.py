"""Methods that claim to keep a foundation model: no message from the server carries it, or something close to it."""

from functools import partial

import pytest
import torch

from fedfm.aggregation.base import Aggregator
from fedfm.config.experiment import Experiment
from fedfm.config.registry import available, resolve
from fedfm.core.federation import Federation
from fedfm.core.wire import payload
from fedfm.engines.local.engine import LocalLink
from fedfm.linalg.params import Params
from fedfm.runtime.client import Silos
from fedfm.runtime.client_memory import secret
from fedfm.runtime.evaluation import Evaluation
from fedfm.runtime.population import populate

KEEPING = sorted(m for m in available("methods") if resolve("methods", m)().traits.keeps_foundation)
NEAR = 0.2  # of the way from the clients' mean to the foundation model is left: a copy with some noise on it
WINDOW = 64  # consecutive bytes of a tensor that no message may hold


class Tap:
    """A link that keeps what the server sends and what it gets."""

    def __init__(self, link):
        self._link, self.sent, self.got, self.bytes = link, [], [], []

    @property
    def clients(self):
        return self._link.clients

    def exchange(self, requests):
        first = requests[0].payload
        self.sent += [(requests[0].round, value) for value in first.values() if isinstance(value, Params)]
        self.bytes.append(b"".join(bytes(piece) for piece in payload.encode(first)[1]))
        for reply in self._link.exchange(requests):
            if reply.value is not None and hasattr(reply.value, "delta"):
                self.got.append((reply.round, reply.value))
            yield reply


def listen(method, folder, rounds=2, **keys):
    """(method, tap) after a run of the small experiment with the shipped model as its secret."""
    experiment = Experiment.from_dict(
        {
            "data": {"name": "digits", "limit": 60, "partition": {"name": "iid", "clients": 3}},
            "model": {"name": "nano-vit", "weights": "random", "adaptation": {"name": "full"}},
            "method": {
                "name": method,
                "rounds": rounds,
                "foundation": "nano-vit",
                "local": {"learning_rate": 0.05},
                **keys,
            },
        }
    )
    population = populate(experiment)
    silos = Silos(experiment.method, Aggregator(), population, memory=folder / "memory")
    tap = Tap(LocalLink(silos))
    fed = Federation(tap, model=population.model, secret=partial(secret, folder, "server"), aggregator=Aggregator())
    fed.begin(0)
    state = experiment.method.init(fed)
    for t in range(1, rounds + 1):
        fed.begin(t)
        state = experiment.method.step(fed, state, t)
        w = experiment.method.params_for(state, "")
        fed.ask(Evaluation(experiment.method).evaluate, counted=False, w=w, part="test")
    return experiment.method, fed, tap


def copies(method, fed, tap):
    """Names of foundation tensors that some message carries, bit for bit or nearly."""
    pieces = method.matching(fed).pieces
    means = {}
    for t, update in tap.got:
        mean = means.setdefault(t, [0.0, None])
        term = update.weight * update.delta
        mean[0] += update.weight
        mean[1] = term if mean[1] is None else mean[1] + term
    start = dict(reversed(tap.sent))  # w_t is the first that a round sends
    found = set()
    for name, (region, p) in pieces.items():
        if p.numel() * 4 < WINDOW or float(p.std()) == 0:
            continue  # a constant tensor is found everywhere
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            raw = p.to(dtype).contiguous().view(torch.uint8).reshape(-1).numpy().tobytes()
            windows = [raw[i : i + WINDOW] for i in range(0, len(raw) - WINDOW + 1, max(WINDOW, len(raw) // 8))]
            found |= {name for w in windows for message in tap.bytes if len(set(w)) > 8 and w in message}
        part = tuple(slice(length) for length in region)
        for t, w in tap.sent:
            if t not in means:
                continue
            total, summed = means[t]
            mean = (start[t] + (1 / total) * summed)[name][part].double()
            way = float((p.double() - mean).norm())
            if float((w[name][part].double() - p.double()).norm()) < NEAR * way:
                found.add(name)
    return found


@pytest.mark.proof
@pytest.mark.each_value
@pytest.mark.parametrize("name", KEEPING)
@pytest.mark.parametrize("keys", [{}, {"fraction": 0.67}], ids=["everybody", "some"])
def test_no_message_carries_a_foundation_weight(name, keys, tmp_path):
    assert copies(*listen(name, tmp_path, **keys)) == set()


@pytest.mark.proof
def test_the_search_finds_what_weight_initialisation_discloses(tmp_path):
    method, fed, tap = listen("weight_init", tmp_path, rounds=1)
    named = {n for n, (_, p) in method.matching(fed).pieces.items() if p.numel() * 4 >= WINDOW and float(p.std())}
    assert copies(method, fed, tap) == named


@pytest.mark.proof
def test_the_search_finds_a_copy_with_noise_on_it(tmp_path):
    method, fed, tap = listen("fedbaf", tmp_path, psi=30.0)  # a near 30: 3 % of the way is left
    assert copies(method, fed, tap)


def test_fedbaf_claims_it():
    assert KEEPING == ["fedbaf"]
