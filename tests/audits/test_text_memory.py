"""Memorisation by language models: canaries and regurgitation, against real generation and uniform ranks."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from test_running_text import tables as text_tables

import fedfm
import tiny_text
from fedfm.audits import regurgitation, text_canaries
from fedfm.audits.model_membership import final_models
from fedfm.audits.regurgitation import Halves, verbatim
from fedfm.audits.shadow_runs import RowPool
from fedfm.audits.stated_epsilon import Claim
from fedfm.audits.text_canaries import CANDIDATES, COPIES, LENGTH, PlantedTexts, ranks_of, with_texts
from fedfm.models.preprocessing import IGNORE
from fedfm.runtime.population import populate
from fedfm.runtime.run_directory import Run

ATTACKS = ("text_canaries", "regurgitation")
HARD = {"epochs": 150, "learning_rate": 0.02, "batch_size": 4}
FULL = {"name": "full"}  # and method "local": LoRA and means of models remember less


@pytest.fixture(autouse=True)
def _one_shadow_run(monkeypatch):
    monkeypatch.setattr(text_canaries, "BUDGET", 0.0)


def run(folder, out, adaptation=None, **changes):
    tables = text_tables(folder, **changes)
    tables["model"]["adaptation"] = adaptation or tables["model"]["adaptation"]
    fedfm.run(tables, out)
    return out


def population_of(folder, **changes):
    from fedfm.config.experiment import Experiment

    return populate(Experiment.from_dict(text_tables(folder, **changes)))


@pytest.fixture(scope="module", params=["language_modelling", "instruction"])
def remembered(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("remembered")
    return run(folder, folder / "run", FULL, method="local", task=request.param, local=HARD, n=16)


# --- regurgitation ----------------------------------------------------------------------------------------------------


def by_generating(model, ids, start):
    """The tokens from ``start`` on that greedy decoding writes before its first error, one token at a time."""
    given = ids[:start].tolist()
    while len(given) < len(ids):
        with torch.no_grad():
            token = int(model.module(input_ids=torch.tensor([given])).logits[0, -1].argmax())
        if token != ids[len(given)]:
            break
        given.append(token)
    return len(given) - start


@pytest.mark.proof
def test_one_pass_finds_what_greedy_decoding_writes(remembered):
    saved = Run.open(remembered)
    population = populate(saved.experiment)
    client, pool = population.clients[0], RowPool(population, 1)
    w, rows = final_models(saved, population)[client], pool.compared_rows(client)
    found = verbatim(saved.experiment.method, population.model, w, rows)
    population.model.load(w)
    for i, ids in enumerate(rows.tokens):
        first = int(rows.tensors["answer_start"][i]) if "answer_start" in rows.tensors else 1
        start = first + (len(ids) - first + 1) // 2
        assert found.length[i] == len(ids) - start
        assert found.written[i] == by_generating(population.model, ids, start)
    assert found.written.max() > 1


def test_a_finding_counts_rows_and_has_exact_intervals():
    members = Halves(np.array([10, 12, 9, 3, 4]), np.array([10, 20, 20, 20, 9]))
    strangers = Halves(np.array([0, 11, *[0] * 38]), np.full(40, 20))
    found = regurgitation.finding(members, strangers)
    exact = stats.binomtest(2, 4).proportion_ci(0.95, "exact")
    assert (found.estimate, found.low, found.high) == (0.5, pytest.approx(exact.low), pytest.approx(exact.high))
    assert found.bound == pytest.approx(stats.binomtest(1, 40).proportion_ci(0.95, "exact").high)
    assert "1 training rows have a shorter second half" in found.says
    assert found.verdict == "inconclusive"
    many = Halves(np.full(60, 20), np.full(60, 20))
    assert regurgitation.finding(many, strangers).verdict == "leaks"
    none = Halves(np.zeros(200, dtype=int), np.full(200, 20))
    assert regurgitation.finding(none, none).verdict == "holds"
    assert regurgitation.finding(none, Halves(np.zeros(0), np.zeros(0))).estimate is None


@pytest.mark.proof
def test_rows_that_were_learned_by_heart_are_written_and_strangers_are_not(tmp_path):
    (found,) = fedfm.audit(run(tmp_path, tmp_path / "run", FULL, method="local", local=HARD), ["regurgitation"])
    assert found.verdict == "leaks"
    assert found.estimate > 0.6
    assert found.bound < 0.6


# --- canaries ---------------------------------------------------------------------------------------------------------


def test_ranks_without_memory_are_uniform_and_exposure_is_their_mean():
    rng = np.random.default_rng(0)
    ranks = ranks_of(rng.normal(size=(4000, CANDIDATES)))
    assert stats.chisquare(np.bincount(ranks, minlength=CANDIDATES + 1)[1:]).pvalue > 0.01
    everyone = np.arange(1, CANDIDATES + 1)
    expected = math.log2(CANDIDATES) - math.lgamma(CANDIDATES + 1) / math.log(2) / CANDIDATES
    assert text_canaries.exposure(everyone) == pytest.approx(expected)
    assert ranks_of(np.array([[2.0, 1.0, 3.0], [1.0, 1.0, 0.0]])).tolist() == [2, 2]  # an equal score ranks before


def test_a_finding_of_ranks_has_an_exact_interval_and_what_epsilon_allows():
    ranks = {1: np.array([1] * 12 + [5] * 68), COPIES: np.array([1, 2])}
    found = text_canaries.finding(ranks, 1, Claim(2.0, 1e-5, 2))
    exact = stats.binomtest(12, 80).proportion_ci(0.95, "exact")
    assert (found.low, found.high) == (pytest.approx(exact.low), pytest.approx(exact.high))
    assert found.verdict == "leaks"
    assert found.detail["allowed_by_epsilon"] == pytest.approx(math.exp(2.0) / CANDIDATES + 1e-5)
    assert text_canaries.finding({1: np.full(80, 50), COPIES: np.zeros(0)}, 1, None).verdict == "holds"
    assert text_canaries.finding({1: np.zeros(0), COPIES: np.zeros(0)}, 1, None).estimate is None


@pytest.mark.parametrize("task", ["language_modelling", "instruction"])
def test_each_canary_is_among_its_clients_rows_and_no_other_candidate_is(tmp_path, task):
    population = population_of(tmp_path, task=task)
    pool = RowPool(population, seed=1)
    planted = PlantedTexts(pool, 4, np.random.default_rng(0))
    assert sum(len(c.places) for c in planted.canaries.values()) == 5
    for client in population.clients:
        own = population.data(client).train
        told = [row.tolist() for row in planted.data(client).train.tokens]
        assert told[: len(own)] == [row.tolist() for row in own.tokens]
        canaries = planted.canaries.get(client)
        if canaries is None:
            assert len(told) == len(own)
            continue
        assert len(told) == len(own) + canaries.copies.sum()
        rows = canaries.candidates(pool, population.model)
        texts = [row.tolist() for row in rows.tokens]
        assert [told.count(texts[i * CANDIDATES]) for i in range(len(canaries.places))] == canaries.copies.tolist()
        _, targets = population.model.flat(population.model.logits(batch := rows.batch(range(len(rows)))), batch)
        counted = [row[row != IGNORE].tolist() for row in targets.reshape(len(rows), -1)]
        assert counted == canaries.texts.reshape(-1, LENGTH).tolist()  # the loss counts the random text alone
    assert len(planted.data(population.clients[0]).test) == 0


def test_an_encoder_decoders_canary_is_its_output():
    from types import SimpleNamespace

    from fedfm.core.rows import Rows

    rows = Rows({"targets": torch.tensor([[5, 6, IGNORE], [7, 8, 9]])}, tokens=[[1, 2], [3]])
    found = with_texts(rows, np.array([[4] * LENGTH]), SimpleNamespace(), 1)
    assert found.tensors["targets"].tolist() == [[5, 6, *[IGNORE] * 6], [4] * LENGTH]
    assert [t.tolist() for t in found.tokens] == [[1, 2], [3]]


@pytest.mark.proof
def test_canaries_are_recognised_where_the_model_remembers_and_not_where_it_hardly_trains(tmp_path, monkeypatch):
    monkeypatch.setattr(text_canaries, "SHARE", 1)
    found = {}
    for name, local in (("hard", HARD), ("soft", {**HARD, "epochs": 1, "learning_rate": 1e-5})):
        out = run(tmp_path, tmp_path / name, FULL, method="local", task="instruction", local=local, n=24)
        (found[name],) = fedfm.audit(out, ["text_canaries"])
    assert found["hard"].verdict == "leaks"
    assert found["soft"].estimate < 0.1


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ditto", "local", "centralised"])
def test_models_of_clients_and_pooled_rows_are_audited(tmp_path, method):
    found = {
        f.name: f for f in fedfm.audit(run(tmp_path, tmp_path / "run", method=method, local={"epochs": 1}), ATTACKS)
    }
    assert found["text_canaries"].detail["by_copies"]["1"]["canaries"] > 0
    assert found["regurgitation"].detail["by_tokens"]["10"]["training_rows"]["rows"] > 0
    assert {f.verdict for f in found.values()} <= {"holds", "leaks", "inconclusive"}


def test_the_same_audit_gives_the_same_figures(tmp_path):
    out = run(tmp_path, tmp_path / "run", local={"epochs": 2})
    assert fedfm.audit(out, ATTACKS) == fedfm.audit(out, ATTACKS)


def test_a_classifier_has_no_text_to_write(tmp_path):
    from fedfm.errors import InputError

    fedfm.run(tiny_text.tables(tiny_text.save_all(tmp_path), "fedavg", "bert", 1), tmp_path / "run")
    for name in ATTACKS:
        with pytest.raises(InputError, match=name):
            fedfm.audit(tmp_path / "run", [name])


def test_canaries_under_dp_sgd_say_what_epsilon_allows(tmp_path):
    wrong = text_tables(tmp_path, local={"epochs": 1})
    wrong["privacy"] = {"unit": "record", "mechanism": "dp_sgd", "target_epsilon": 1.0, "delta": 1e-2, "clip_norm": 1.0}
    fedfm.run(wrong, tmp_path / "run")
    (found,) = fedfm.audit(tmp_path / "run", ["text_canaries"])
    assert found.detail["allowed_by_epsilon"] == pytest.approx(math.exp(1.0) / CANDIDATES + 1e-2, rel=1e-3)
    assert "epsilon = 1 allows" in found.says
