"""Membership in runs on running text, whose rows are blocks of joined lines; instructions, row by row, as control."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import fedfm
import tiny_text
from fedfm.audits.inference import rates
from fedfm.audits.loss_drops import LossDrops
from fedfm.audits.model_membership import attack, final_models
from fedfm.audits.replay import open_finished, replay
from fedfm.audits.row_evidence import by_class
from fedfm.audits.shadow_runs import Half, RowPool
from fedfm.config.experiment import Experiment
from fedfm.core.client import POOLED
from fedfm.runtime.population import populate

WORDS = [*tiny_text.COMMON, *" ".join(tiny_text.WORDS.values()).split()]
TEXTS = {"text_canaries", "regurgitation"}
NAMES = {"model_membership", "model_membership_tpr", "update_membership"}
LENGTH = 40  # tokens of a block: places of the model


@pytest.fixture(autouse=True)
def _few_shadows(monkeypatch):
    monkeypatch.setattr("fedfm.audits.shadow_runs.MOST", 8)
    monkeypatch.setattr("fedfm.audits.text_canaries.CANARIES", 9)  # what they find is shown in test_text_memory.py


def lines(path, seed=0, n=80, instructions=False, train=WORDS, test=WORDS):
    """A jsonl of random words, half of it test lines: a model can only remember them."""
    rng = np.random.default_rng(seed)
    with path.open("w") as file:
        for i in range(n):
            words = rng.choice(test if i % 2 else train, 12).tolist()
            texts = {"text": " ".join(words)}
            if instructions:
                texts = {"instruction": " ".join(words[:6]), "output": " ".join(words[6:])}
            file.write(json.dumps({**texts, "split": "test" if i % 2 else "train"}) + "\n")


def tables(folder, method="fedavg", task="language_modelling", local=None, **rows):
    if not (folder / "llama").exists():
        tiny_text.save_llama(folder / "llama")
    lines(folder / "rows.jsonl", instructions=task == "instruction", **rows)
    local = {"epochs": 40, "learning_rate": 0.03, "batch_size": 16, **(local or {})}
    found = tiny_text.tables(folder, method, "llama", rounds=1, clients=2, local=local, lora={"rank": 16})
    found["model"]["task"] = task
    return found


def run(folder, **changes):
    fedfm.run(tables(folder, **changes), folder / "run")
    return folder / "run"


def audited(path, attacks=()):
    return {f.name: f for f in fedfm.audit(path, attacks)}


def population_of(folder, **changes):
    return populate(Experiment.from_dict(tables(folder, **changes)))


@pytest.fixture(scope="module")
def remembered(tmp_path_factory):
    return run(tmp_path_factory.mktemp("remembered"))


def test_no_block_has_lines_of_members_and_of_strangers(tmp_path):
    trained, unused = tiny_text.COMMON, WORDS[len(tiny_text.COMMON) :]
    population = population_of(tmp_path, train=trained, test=unused, n=100)  # 25 lines of a client, 7.5 blocks
    pool, seen = RowPool(population, seed=1), set[int]()
    vocabulary = population.model.tools.tokenizer
    for client in population.clients:
        rows, split = pool.compared_rows(client), len(pool.members[client])
        assert (
            rows.take(range(split))
            .to_padded()
            .tensors["input_ids"]
            .equal(population.data(client).train.to_padded().tensors["input_ids"])
        )  # what the client trains on
        for place in range(len(rows)):
            ids = rows.tokens[place].tolist()
            words = set(vocabulary.convert_ids_to_tokens(ids))
            assert words <= set(trained if place < split else unused)
            assert pool.labels(client)[place] == (len(ids) == LENGTH)
        seen |= set(pool.index(client).tolist())
        assert (split, len(rows) - split) == (8, 8)
    assert seen == set(pool.order.tolist()) == set(range(32))
    assert population.sizes() == dict.fromkeys(population.clients, 8)


def test_lines_that_no_client_has_are_dealt_before_they_are_joined(tmp_path):
    population = population_of(tmp_path)
    held = {c: replace(rows, test=rows.test[:0]) for c, rows in population.federated.clients.items()}
    population.federated = replace(population.federated, clients=held)
    pool = RowPool(population, seed=1)
    assert not pool.own
    strangers = [pool.rows(pool.strangers[client]).tokens.concatenate() for client in population.clients]
    assert [len(tokens) for tokens in strangers] == [20 * 12] * 2  # half of 40 lines each
    counts = torch.bincount(torch.cat(strangers))
    assert counts.equal(torch.bincount(population.test.tokens.concatenate()))


def test_coins_decide_on_complete_blocks(tmp_path):
    population = population_of(tmp_path)
    pool = RowPool(population, seed=1)
    half = Half(pool, 0, seed=1)
    for client in population.clients:
        places, coins = half.taken[client]
        assert 0 < coins.sum() < len(coins) == len(pool.members[client]) + len(pool.strangers[client])
        given = half.data(client).train
        expected = pool.rows(places[coins])
        assert [t.tolist() for t in given.tokens] == [t.tolist() for t in expected.tokens]
    assert len(half.data(POOLED).train) == sum(coins.sum() for _, coins in half.taken.values())


def test_a_pool_of_all_lines_joins_them_as_training_does(tmp_path):
    population = population_of(tmp_path, method="centralised")
    pool = RowPool(population, seed=1, pooled=True)
    assert pool.owners == pool.honest == [POOLED]
    members = pool.rows(pool.members[POOLED])
    assert (
        members.to_padded().tensors["input_ids"].equal(population.data(POOLED).train.to_padded().tensors["input_ids"])
    )
    strangers = pool.rows(pool.strangers[POOLED])
    assert strangers.to_padded().tensors["input_ids"].equal(population.test.to_padded().tensors["input_ids"])
    half = Half(pool, 0, seed=1)
    assert len(half.data(POOLED).train) == half.taken[POOLED][1].sum()
    assert half.clients == population.clients


@pytest.mark.proof
@pytest.mark.parametrize("task", ["language_modelling", "instruction"])
def test_memorised_text_is_found_in_the_model_and_in_the_updates(tmp_path, remembered, task):
    text = task == "language_modelling"
    # Estimates of 20 lines vary by 0.1 between draws: seed 0 gives 0.71, 1 and 2 give 0.97 and 0.89.
    found = audited(remembered if text else run(tmp_path, task=task, n=40, seed=1))
    assert set(found) == NAMES | TEXTS | {"repeated_questions"}
    rows = 12 if text else 20  # blocks of 40 lines, or these lines
    for name in ("model_membership", "update_membership"):
        assert found[name].detail["members"] == found[name].detail["strangers"] == rows
    assert found["model_membership"].estimate > 0.7
    assert found["model_membership"].low > 0.55
    assert found["update_membership"].low > 0.8
    for finding in (found[name] for name in NAMES):
        assert (f"A row is not a line, but a block of at most {LENGTH} tokens of joined lines" in finding.says) == text


@pytest.mark.proof
def test_a_model_that_saw_other_lines_is_not_accused(remembered, tmp_path):
    known, other = open_finished(remembered), open_finished(run(tmp_path, seed=1))
    population = populate(known.experiment)
    told, how = attack(known, population, final_models(other, population), lambda text: None)
    assert "8 shadow runs" in how
    members, strangers = (np.concatenate([getattr(t, name) for t in told]) for name in ("members", "strangers"))
    assert rates.auc(members, strangers) == pytest.approx(0.5, abs=0.36)  # 12 of each: three standard errors


@pytest.mark.proof
def test_updates_of_other_lines_accuse_nobody(remembered, tmp_path):
    known, other = open_finished(remembered), population_of(tmp_path, seed=1, n=600)
    pool = RowPool(other, seed=1)
    drops = LossDrops(known)
    drops.pool = pool
    replay(known, watched={"drops": drops}, keep=False)
    scores = [(drops.found[c], len(pool.members[c])) for c in pool.honest]
    found = np.mean([rates.auc(s[:split], s[split:]) for s, split in scores])
    assert found == pytest.approx(0.5, abs=0.13)  # 90 of each: three standard errors


def test_an_untrained_model_reveals_nothing(tmp_path):
    found = audited(run(tmp_path, n=200, local={"epochs": 1, "learning_rate": 1e-6}), ["model_membership"])
    finding = found["model_membership"]
    assert finding.low < 0.5 < finding.high
    assert finding.detail["members"] == 30


def test_without_shadow_runs_a_short_block_is_compared_with_short_ones(remembered, monkeypatch):
    monkeypatch.setattr("fedfm.audits.model_membership.affordable", lambda run, population: 0)
    (finding, _) = fedfm.audit(remembered, ["model_membership"])
    assert finding.says.startswith("By the loss, with one threshold for whole blocks and one for shorter ones, a ")
    assert finding.estimate > 0.8


@pytest.mark.proof
def test_everybodys_lines_in_one_place_are_attacked_as_blocks_of_all(tmp_path):
    local = {"epochs": 20, "learning_rate": 0.05}
    found = audited(run(tmp_path, method="centralised", local=local), ["model_membership"])["model_membership"]
    assert found.detail["clients"] == 1
    assert found.detail["members"] == 12
    assert found.low > 0.55


def test_without_labels_all_rows_are_of_one_class():
    assert by_class(np.array([1.0, 5.0, 3.0]), None).tolist() == [-2.0, 2.0, 0.0]
    assert by_class(np.array([1.0, 5.0, 3.0]), np.array([0, 0, 1])).tolist() == [-2.0, 2.0, 0.0]
