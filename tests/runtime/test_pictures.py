"""Prepared pictures stay within FEDFM_MEMORY, and what is prepared twice is the same."""

import pytest
from safetensors.torch import load_file

import fedfm
from fedfm.config.experiment import Experiment
from fedfm.runtime.population import populate
from tiny_clip import pictures, save


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    place = tmp_path_factory.mktemp("pictures")
    save("clip", place / "model")
    pictures(place / "rows.npz")
    model = {"name": str(place / "model"), "task": "zero_shot", "adaptation": {"name": "lora", "rank": 2}}
    return {
        "data": {"path": str(place / "rows.npz"), "partition": {"name": "iid", "clients": 6}},
        "model": model,
        "method": {"name": "fedavg", "rounds": 2, "local": {"learning_rate": 0.1}},
        "run": {"workers": 1},
    }


def prepared_bytes(population):
    return sum(rows.tensors["pixel_values"].nbytes for data in population._data.values() for rows in data.ready)


def test_pictures_of_all_clients_fit_into_the_memory_that_is_allowed(tables, monkeypatch):
    population = populate(Experiment.from_dict(tables))
    everything = 0
    for client in population.clients:
        everything += population.data(client).train.tensors["pixel_values"].nbytes
    assert prepared_bytes(population) == everything
    one = everything // 6
    monkeypatch.setenv("FEDFM_MEMORY", str(4 * one))
    small = populate(Experiment.from_dict(tables))
    for _ in range(2):
        for client in small.clients:
            rows = small.data(client).train
            assert prepared_bytes(small) <= 5 * one  # four that fit, and the one in use
            assert rows.tensors["pixel_values"].equal(population.data(client).train.tensors["pixel_values"])
    kept = small.data(small.clients[0])
    assert small.data(small.clients[5]) is not None
    assert small.data(small.clients[0]) is kept


def test_a_run_with_little_memory_has_the_same_bits(tables, tmp_path, monkeypatch):
    fedfm.run(tables, tmp_path / "much")
    monkeypatch.setenv("FEDFM_MEMORY", "100000")
    fedfm.run(tables, tmp_path / "little")
    much, little = (load_file(tmp_path / name / "adapter/adapter_model.safetensors") for name in ("much", "little"))
    assert all(much[name].equal(little[name]) for name in much)
