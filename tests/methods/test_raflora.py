"""raFLoRA: the partition_mean mean against NumPy, FlexLoRA as its special case, and energy that stays where it was."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedfm
import tiny_text
from fedfm.linalg.params import Params
from fedfm.methods import flexlora
from fedfm.methods._lora_products import Term, delta_w
from fedfm.methods.flexlora import ENERGY, FlexLoRA
from fedfm.methods.raflora import RaFLoRA, partition_mean
from fedfm.models.adapters import lora

A, B = "q.lora_A.default.weight", "q.lora_B.default.weight"
RANKS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 50)), min_size=1, max_size=6)


def adapter(b, a):
    return Params({A: torch.as_tensor(a).float(), B: torch.as_tensor(b).float()})


def drawn(rng, r, d_out=6, d_in=7):
    return adapter(rng.normal(size=(d_out, r)), rng.normal(size=(r, d_in)))


def dense(x):
    return (x[0].double() @ x[1].double()).numpy()


def mean_by_row(found, weights, alpha, server, most):
    """Each column of B with its row of A alone: its mean over the clients that have it, else the server's."""
    out = np.zeros((6, 7))
    for i in range(most):
        holders = [(n, w) for n, w in zip(weights, found, strict=True) if len(w[A]) > i]
        parts = holders or [(1, server)]
        total = sum(n for n, _ in parts)
        for n, w in parts:
            b, a = w[B].numpy().astype(np.float64), w[A].numpy().astype(np.float64)
            out += n / total * alpha / len(a) * np.outer(b[:, i], a[i])
    return out


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), clients=RANKS, absent=st.integers(1, 5), alpha=st.floats(0.5, 32))
def test_each_row_and_column_is_the_mean_over_the_clients_that_have_it(seed, clients, absent, alpha):
    rng = np.random.default_rng(seed)
    found, weights = [drawn(rng, r) for r, _ in clients], [n for _, n in clients]
    ranks = sorted({*(r for r, _ in clients), absent})  # a client of this rank is not in the cohort
    server = drawn(rng, max(ranks))
    terms = [Term(n / sum(weights), w) for n, w in zip(weights, found, strict=True)]
    expected = mean_by_row(found, weights, alpha, server, max(ranks))
    np.testing.assert_allclose(dense(partition_mean(terms, ranks, server, alpha)["q"]), expected, rtol=1e-9, atol=1e-9)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), r=st.integers(1, 5), weights=st.lists(st.integers(1, 50), min_size=1, max_size=5))
def test_with_equal_ranks_it_has_the_bits_of_flexlora(seed, r, weights):
    rng = np.random.default_rng(seed)
    terms = [Term(n / sum(weights), drawn(rng, r)) for n in weights]
    ours, theirs = partition_mean(terms, [r], drawn(rng, 5), 8.0)["q"], delta_w(terms, 8.0)["q"]
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), clients=RANKS)
def test_clients_that_do_not_train_change_nothing_and_flexlora_shrinks_what_few_hold(seed, clients):
    rng, alpha = np.random.default_rng(seed), 8.0
    ranks = sorted({r for r, _ in clients})
    start = drawn(rng, ranks[-1])
    start = start.replace(flexlora.cut(lora.factors(start, alpha), start, alpha)[0])  # its rows are singular directions
    p = np.array([n for _, n in clients]) / sum(n for _, n in clients)
    terms = [Term(p_k, lora.first(start, r)) for p_k, (r, _) in zip(p, clients, strict=True)]
    before = dense(lora.factors(start, alpha)["q"])
    np.testing.assert_allclose(
        dense(partition_mean(terms, ranks, start, alpha)["q"]), before, rtol=1e-5, atol=1e-5 * np.linalg.norm(before)
    )
    u, sigma, v = np.linalg.svd(before)
    share = [
        p[[r > i for r, _ in clients]].sum() for i in range(ranks[-1])
    ]  # the weight of those that hold direction i
    expected = u[:, : ranks[-1]] * (sigma[: ranks[-1]] * share) @ v[: ranks[-1]]
    np.testing.assert_allclose(
        dense(delta_w(terms, alpha)["q"]), expected, rtol=1e-4, atol=1e-5 * np.linalg.norm(before)
    )


def test_a_partition_that_nobody_asked_holds_keeps_the_servers_value():
    rng = np.random.default_rng(0)
    server, one = drawn(rng, 3), drawn(rng, 1)
    found = dense(partition_mean([Term(1.0, one)], [1, 3], server, 3.0)["q"])
    b, a = server[B].double().numpy(), server[A].double().numpy()
    np.testing.assert_allclose(found, dense(lora.factors(one, 3.0)["q"]) + b[:, 1:] @ a[1:], rtol=1e-9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_text.save_all(tmp_path_factory.mktemp("models"))


def run(folder, out, name, rounds=4, **keys):
    return fedfm.run(tiny_text.tables(folder, name, "llama", rounds, lora={"rank": 4, "alpha": 8.0}, **keys), out)


def test_runs_of_equal_ranks_have_the_bits_of_flexlora(folder, tmp_path):
    both = [run(folder, tmp_path / name, name, ranks=[2]) for name in ("flexlora", "raflora")]
    assert both[0]["params_sha256"] == both[1]["params_sha256"]


def test_energy_of_high_ranks_stays_in_raflora_and_fades_in_flexlora(folder, tmp_path):
    share = {}
    for name in ("flexlora", "raflora"):
        result = run(folder, tmp_path / name, name, ranks=[1, 1, 4])
        share[name] = [line[ENERGY] for line in fedfm.load_run(tmp_path / name).metrics() if line["round"]]
        assert result["details"]["cut"]["share"]["1"] == pytest.approx(share[name][-1])
    assert share["raflora"][-1] > 0.8 * share["raflora"][0]
    assert share["flexlora"][-1] < 0.5 * share["flexlora"][0]
    assert share["raflora"][-1] > 5 * share["flexlora"][-1]


def test_flexlora_names_the_loss_where_ranks_differ_and_nowhere_else(folder, tmp_path):
    assert FlexLoRA(ranks=(2, 2)).forewarnings({}) == FlexLoRA().forewarnings({}) == []
    assert RaFLoRA(ranks=(1, 4)).forewarnings({}) == []
    run(folder, tmp_path / "run", "flexlora", 1, ranks=[1, 4])
    notices = json.loads((tmp_path / "run" / "manifest.json").read_text())["notices"]
    assert [n for n in notices if "raflora keeps it" in n and "above rank 1," in n]


@pytest.mark.parametrize("ranks", [[1, 4], [4]])
def test_raflora_resumes_to_the_same_bits(folder, tmp_path, ranks):
    whole = run(folder, tmp_path / "whole", "raflora", 3, ranks=ranks)
    run(folder, tmp_path / "parts", "raflora", 2, ranks=ranks)
    assert fedfm.resume(tmp_path / "parts", rounds=3)["params_sha256"] == whole["params_sha256"]
