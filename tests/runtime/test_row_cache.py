"""Prepared rows on the disk: the same results, found again by what they follow from, and computed again if damaged."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedfm
from fedfm.config.experiment import Experiment
from fedfm.errors import InputError
from fedfm.models.model import Model
from fedfm.runtime import row_cache
from fedfm.runtime.population import populate
from fedfm.runtime.progress import Progress
from small import pictures, tiny_vit
from tiny_text import save_bert, texts


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(row_cache, "LEAST_WORK", 1)
    monkeypatch.setattr(row_cache, "LEAST_TEXTS", 1)
    monkeypatch.setenv("FEDFM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of rows that pass the backbone."""
    seen: list[int] = []
    features = Model.features
    monkeypatch.setattr(Model, "features", lambda self, rows: seen.append(len(rows)) or features(self, rows))
    return seen


def tables(folder: Path, **model: Any) -> dict[str, Any]:
    return {
        "data": {"path": str(pictures(folder, n=60)), "partition": {"name": "iid", "clients": 3}},
        "model": {"name": str(tiny_vit(folder)), "adaptation": {"name": "head"}, **model},
        "method": {"name": "fedavg", "rounds": 2},
        "run": {"workers": 1},
    }


class Notices(Progress):
    def __init__(self) -> None:
        self.found: list[str] = []

    def notice(self, text: str) -> None:
        self.found.append(text)


def files(place: Path) -> list[Path]:
    return sorted(place.glob("*/*"))


def test_a_second_run_reads_what_the_first_has_computed(
    tmp_path: Path, place: Path, encoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Notices(), Notices()
    expected = fedfm.run(tables(tmp_path), tmp_path / "one", progress=first)["params_sha256"]
    assert sum(encoded) >= 60
    assert {f.parent.name for f in files(place)} == {"features"}
    assert all(stat.S_IMODE(f.stat().st_mode) == 0o600 for f in files(place))
    assert all(stat.S_IMODE(f.parent.stat().st_mode) == 0o700 for f in files(place))
    encoded.clear()
    other = tables(tmp_path) | {"method": {"name": "fedprox", "rounds": 2, "mu": 0.0}}
    assert fedfm.run(other, tmp_path / "two", progress=second)["params_sha256"] == expected
    assert encoded == [1]  # the ledger counts the operations of one row
    said = f"features of 3 of 3 clients' training rows come from the cache {place / 'features'}"
    assert said in second.found
    assert said not in first.found
    monkeypatch.setenv("FEDFM_CACHE", "")
    assert fedfm.run(tables(tmp_path), tmp_path / "off")["params_sha256"] == expected
    assert sum(encoded) >= 60


def test_a_damaged_file_is_computed_again(tmp_path: Path, place: Path) -> None:
    expected = fedfm.run(tables(tmp_path), tmp_path / "one")["params_sha256"]
    before = {file: file.read_bytes() for file in files(place)}
    for k, (file, data) in enumerate(before.items()):
        file.write_bytes(data[: len(data) // 2] if k % 2 else data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    assert fedfm.run(tables(tmp_path), tmp_path / "two")["params_sha256"] == expected
    assert {file: file.read_bytes() for file in files(place)} == before


def test_a_file_is_of_these_rows_and_this_model(tmp_path: Path, place: Path) -> None:
    def names(**changes: Any) -> set[str]:
        base = tables(tmp_path)
        population = populate(Experiment.from_dict({**base, **changes}))
        assert population.cache is not None
        table = population.federated.table
        index = np.arange(20)
        return {str(population.cache.path(table, i)) for i in (index, index[::-1])}

    base = tables(tmp_path)
    known = names()
    assert len(known) == 2
    assert names() == known
    assert names(method={"name": "fedprox", "rounds": 5}, run={"seed": 4}) == known
    assert not known & names(model={**base["model"], "dtype": "bfloat16"})
    (tmp_path / "other").mkdir()
    again = {**base["data"], "path": str(pictures(tmp_path / "other", n=60, seed=1))}
    assert not known & names(data=again)
    config = Path(base["model"]["name"]) / "preprocessor_config.json"
    config.write_text(config.read_text().replace('"image_mean": [\n    0.5', '"image_mean": [\n    0.4'))
    assert not known & names()


def test_two_runs_at_once(tmp_path: Path, place: Path) -> None:
    exp, found = tables(tmp_path), {}
    populations = [populate(Experiment.from_dict(exp)) for _ in range(2)]

    def work(k: int) -> None:
        found[k] = [populations[k].data(c).train.tensors["features"].clone() for c in populations[k].clients]

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(a.equal(b) for a, b in zip(found[0], found[1], strict=True))
    assert len(files(place)) == 3
    assert not [f for f in files(place) if f.name.startswith(".")]


def test_tokens_of_many_texts_are_kept(tmp_path: Path, place: Path) -> None:
    save_bert(tmp_path / "bert")
    exp = tables(tmp_path) | {
        "data": {"path": str(texts(tmp_path / "rows.jsonl")), "partition": {"name": "iid", "clients": 2}},
        "model": {"name": str(tmp_path / "bert"), "adaptation": {"name": "lora", "rank": 2}},
    }
    expected = fedfm.run(exp, tmp_path / "one")["params_sha256"]
    assert {f.parent.name for f in files(place)} == {"tokens"}
    notices = Notices()
    assert fedfm.run(exp, tmp_path / "two", progress=notices)["params_sha256"] == expected
    assert any(text.startswith("tokens of 2 of 2 clients' training rows") for text in notices.found)


def test_the_least_recently_used_files_make_room(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(name: str, seed: int) -> str:
        exp = tables(tmp_path) | {"run": {"workers": 1, "seed": seed}}  # the seed deals other rows to each client
        return str(fedfm.run(exp, tmp_path / name)["params_sha256"])

    first = run("one", 0)
    size = sum(f.stat().st_size for f in files(place))
    whole = set(files(place))
    for age, path in enumerate(sorted(whole)):
        os.utime(path, (age, age))
    rest = sorted(whole)[1:]
    row_cache.trim(place, size - 1)
    assert set(files(place)) == set(rest)
    monkeypatch.setenv("FEDFM_CACHE_GB", str(1.5 * size / 1e9))
    assert run("two", 0) == first  # reads what is left, which now counts as used, and computes the rest
    old = {path for path in files(place) if path.stat().st_mtime < 1_000}
    assert not old
    run("three", 1)
    assert sum(f.stat().st_size for f in files(place)) <= 1.5 * size
    assert not whole <= set(files(place))
    monkeypatch.setenv("FEDFM_CACHE_GB", "0")
    assert run("four", 0) == first
    assert not files(place)
    monkeypatch.setenv("FEDFM_CACHE_GB", "much")
    with pytest.raises(InputError, match='FEDFM_CACHE_GB = "much"'):
        run("five", 0)
