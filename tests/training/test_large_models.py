"""Training of large models in little memory: fewer copies, the same bits."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fedfm
import small
from fedfm.core import storage
from fedfm.linalg import mapped_files, out_of_core, pages
from fedfm.linalg.params import Params
from fedfm.linalg.threads import torch_threads
from fedfm.models.memory_budget import by_tokens
from fedfm.runtime import server
from fedfm.training import Adam, AdamW, loop, update_rules
from fedfm.training.update_rules import Rule


def resident(flat: torch.Tensor) -> int:
    """Bytes of the vector's mapping that are in this process's memory."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= flat.data_ptr() < int(found[2], 16)
        elif inside and line.startswith("Rss:"):
            return 1024 * int(line.split()[1])
    raise LookupError("no mapping has this address")


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every vector counts as large."""
    monkeypatch.setattr(pages, "LARGE", 1)


@pytest.mark.parametrize("local", [Adam(weight_decay=0.1), AdamW(weight_decay=0.1)], ids=["adam", "adamw"])
def test_steps_in_pieces_have_the_bits_of_undivided_steps(monkeypatch: pytest.MonkeyPatch, local: Any) -> None:
    found = []
    for piece in (1 << 30, 1 << 15):
        monkeypatch.setattr(update_rules, "PIECE", piece)
        draw = torch.Generator().manual_seed(0)
        p = torch.randn(3, 41_003, generator=draw)
        rule = Rule(local, p)
        with torch_threads(1):
            for _ in range(4):
                rule.step(p, torch.randn(p.shape, generator=draw))
        found.append(p)
    assert torch.equal(*found)


def test_a_passed_vector_gives_its_pages_back(tmp_path: Path) -> None:
    w = Params({"w": torch.randn(4 << 20)})  # 16 MiB
    storage.save(tmp_path / "x", w)
    mapped = storage.load(tmp_path / "x", Params, mapped=True)
    flat = mapped.flats[torch.float32]
    assert float(flat.sum()) == float(w["w"].sum())
    assert resident(flat) > 15 << 20
    assert torch.equal((mapped + w)["w"], w["w"] + w["w"])
    assert resident(flat) < 1 << 20
    assert torch.equal((w - mapped)["w"], torch.zeros(4 << 20))
    assert torch.equal(flat, w["w"])  # read again
    pages.release(flat)
    assert resident(flat) < 1 << 20
    assert torch.equal(flat, w["w"])


@pytest.mark.usefixtures("large")
def test_a_vector_in_an_anonymous_file() -> None:
    w = Params({"a": torch.randn(1 << 20), "b": torch.randn(7, 5)})
    kept = out_of_core.to_file(w)
    assert kept.flats[torch.float32].data_ptr() != w.flats[torch.float32].data_ptr()
    assert kept.sha256() == w.sha256()
    assert pages.is_mapped(kept.flats[torch.float32])
    two = Params({"a": torch.ones(3), "n": torch.tensor(1)})
    assert out_of_core.to_file(two) is two


def test_a_full_disk_keeps_it_in_memory(monkeypatch: pytest.MonkeyPatch, large: None) -> None:
    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mapped_files, "bytes_in_file", full)
    w = Params({"a": torch.randn(10)})
    assert out_of_core.to_file(w) is w


@pytest.mark.sample("fedavg", "scaffold")
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedadam", "ditto"])
def test_a_run_whose_state_is_mapped_has_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    tables = {
        "data": {"path": str(small.pictures(tmp_path)), "partition": {"name": "iid", "clients": 2}},
        "model": {"name": str(small.tiny_vit(tmp_path)), "adaptation": {"name": "full"}},
        "method": {"name": method, "rounds": 2, "local": {"batch_size": 20}},
        "run": {"workers": 1},
    }
    before, mapped = fedfm.run(tables, tmp_path / "before"), list[bool]()
    monkeypatch.setattr(pages, "LARGE", 1)
    load = storage.load

    def counted(*args: Any, **kwargs: Any) -> Any:
        mapped.append(kwargs.get("mapped", False))
        return load(*args, **kwargs)

    monkeypatch.setattr(storage, "load", counted)
    after = fedfm.run(tables, tmp_path / "after")
    assert after["params_sha256"] == before["params_sha256"]
    assert sum(mapped) >= 3  # after each commit
    manifest = tmp_path / "after" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"result": None}))
    max((tmp_path / "after" / "checkpoint").iterdir()).unlink()
    assert fedfm.resume(tmp_path / "after")["params_sha256"] == before["params_sha256"]


def test_the_vectors_of_a_state() -> None:
    from fedfm.methods.fedadam import Moments

    a, b = Params({"w": torch.ones(9)}), Params({"w": torch.ones(10)})
    for state, found in (
        (a, [a]),
        ({"a": a, "b": {"c": b}}, [a, b]),
        (Moments(b, a, b), [b, a, b]),
        (None, []),
        (3.0, []),
    ):
        assert [id(w) for w in server._vectors(state)] == [id(w) for w in found]


@pytest.mark.usefixtures("large")
def test_gradients_are_there_again_when_training_begins() -> None:
    class Linear:
        def __init__(self) -> None:
            self.module = torch.nn.Linear(3, 2)

        def live(self) -> dict[str, torch.Tensor]:
            return dict(self.module.named_parameters())

    model: Any = Linear()
    flat = loop.flat_of(model)
    model.module(torch.ones(1, 3)).sum().backward()
    assert flat.g.tolist() == [1.0] * 8
    flat.clear()
    assert all(p.grad is None for p in model.live().values())
    for _ in range(2):  # the gradients of two parts of a batch
        model.module(torch.ones(1, 3)).sum().backward()
    flat.collect()
    assert flat.g.tolist() == [2.0] * 8
    assert all(p.grad is None for p in model.live().values())
    flat.clear()
    assert loop.flat_of(model) is flat
    assert flat.g.tolist() == [0.0] * 8
    model.module(torch.ones(1, 3)).sum().backward()
    assert flat.g.tolist() == [1.0] * 8


@pytest.mark.parametrize("size", [1, 3, 5, 8, 100])
def test_gradients_in_pieces_are_those_of_the_undivided_step(size: int) -> None:
    class Two:
        def __init__(self) -> None:
            self.module = torch.nn.ModuleList([torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)])

        def live(self) -> dict[str, torch.Tensor]:
            return dict(self.module.named_parameters())

    model: Any = Two()
    flat = loop.flat_of(model)
    model.module[0](torch.arange(6.0).view(2, 3)).square().sum().backward()  # the second layer gets no gradient
    pieces = [(at.start, at.stop, g.clone()) for at, g in flat.pieces(size)]
    assert [a for a, _, _ in pieces] == list(range(0, 11, size))
    assert pieces[-1][1] == 11
    expected = flat.g.clone()  # of a small model, the gradients' own memory
    assert torch.equal(torch.cat([g for *_, g in pieces]), expected)
    assert not expected[8:].any()
    assert all(p.grad is None for p in model.live().values())


def test_rows_of_a_batch_by_tokens() -> None:
    assert [by_tokens(length, 64) for length in (0, 1, 512, 513, 1024, 4096, 1 << 20)] == [64, 64, 64, 32, 32, 8, 1]
    assert by_tokens(128, 48) == 48
    assert by_tokens(512, 64, each=32_000, budget=1 << 26) == 4
