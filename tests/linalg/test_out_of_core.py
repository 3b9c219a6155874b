"""Vectors that together exceed the memory: where they are stored, and that their values are the same."""

import errno
import functools
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import fedfm
from fedfm.core import storage
from fedfm.errors import InputError
from fedfm.linalg import mapped_files, out_of_core
from fedfm.linalg.client_vectors import Vectors
from fedfm.linalg.mapped_files import location_of
from fedfm.linalg.out_of_core import allocate, keep_all
from fedfm.linalg.params import Params

LINUX = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of mappings")


def file_of(x: Params) -> str:
    """What the process has mapped where the vector's entries lie; "" for memory that no file backs."""
    (flat,) = x.flats.values()
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, *rest = line.split(maxsplit=5)
        begin, end = (int(n, 16) for n in place.split("-"))
        if begin <= flat.data_ptr() < end:
            return rest[4] if len(rest) == 5 else ""
    raise AssertionError("nothing is mapped there")


def test_room_in_a_file_leaves_none_behind_and_its_vectors_outlive_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    layout = Params({"a": torch.zeros(5), "b": torch.zeros(3, dtype=torch.bfloat16), "n": torch.tensor(1)}).layout
    made = allocate(3, layout, most=0)
    assert not list(tmp_path.iterdir())
    for i, x in enumerate(made):
        for flat in x.flats.values():
            flat.fill_(i)
    last = made.pop()
    del made, x
    assert last["a"].tolist() == [2.0] * 5
    assert last["b"].tolist() == [2.0] * 3
    assert int(last["n"]) == 2
    with pytest.raises(OSError, match=r"."):
        allocate(1 << 40, layout, most=0)


@LINUX
def test_a_store_moves_what_does_not_fit_into_a_file_and_changes_no_bit(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(out_of_core, "FILE", 1000)  # two of these vectors
    drawn = [Params({"w": torch.randn(100), "b": torch.randn(3)}) for _ in range(6)]
    kept = keep_all(drawn, most=2 * drawn[0].nbytes)
    assert [x is y for x, y in zip(kept, drawn, strict=True)] == [True, True, False, False, False, False]
    assert all(str(tmp_path) in file_of(x) for x in kept[2:])
    assert len({file_of(x) for x in kept[2:]}) == 2  # files are few
    assert [x.sha256() for x in kept] == [x.sha256() for x in drawn]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("uncached", [mapped_files.UNCACHED, 1 << 30])
def test_reads_and_writes_of_a_file_agree_with_its_mapped_vector(monkeypatch, uncached):
    monkeypatch.setattr(mapped_files, "UNCACHED", uncached)  # a flag that no system knows is left out
    layout = Params({"w": torch.zeros(5000), "b": torch.zeros(3, dtype=torch.bfloat16)}).layout
    one, two = allocate(2, layout, most=0)
    for dtype, flat in two.flats.items():
        file = location_of(flat)
        assert file is not None
        assert file.flags == (uncached if uncached == mapped_files.UNCACHED and file.flags else 0)
        new = torch.randn(len(flat)).to(dtype)
        flat[:] = 1.0
        file.write(2 * dtype.itemsize, new[2:].view(torch.uint8).numpy())
        assert flat[:2].tolist() == [1.0, 1.0]
        assert torch.equal(flat[2:], new[2:])
        flat[-1] = 7.0
        back = torch.empty_like(flat)
        file.read(0, back.view(torch.uint8).numpy())
        assert torch.equal(back, flat)
    assert not any(flat.any() for flat in one.flats.values())
    with pytest.raises(OSError, match="shorter"):
        file.read(0, np.empty(1 << 20, np.uint8))
    assert location_of(torch.zeros(3)) is None


@pytest.mark.parametrize("trouble", [None, "refused", "in part"])
def test_complete_pages_bypass_the_cache_and_the_rest_uses_it(monkeypatch, trouble):
    entries = 40 * mapped_files.PAGE
    (vector,) = allocate(1, Params({"w": torch.zeros(entries)}).layout, most=0)
    flat = vector.flats[torch.float32]
    file = location_of(flat)
    assert file is not None
    if file.direct is None:
        pytest.skip("the system of temporary files takes no whole pages past its cache")
    used, real = [], {"preadv": os.preadv, "pwritev": os.pwritev}

    def call(name: str, descriptor: int, views: list, *rest: int) -> int:
        used.append(descriptor)
        if descriptor == file.direct and trouble == "refused":
            raise OSError(errno.EINVAL, "no")
        if descriptor == file.direct and trouble == "in part" and len(views[0]) == 4 * entries:
            return real[name](file.descriptor, [views[0][:100]], *rest)  # the next begins at no sector
        return real[name](descriptor, views, *rest)

    for name in real:
        monkeypatch.setattr(os, name, functools.partial(call, name))
    new = np.frombuffer(mmap.mmap(-1, 4 * entries), np.float32)
    new[:] = np.random.default_rng(0).standard_normal(entries)
    file.write(0, new)
    assert np.array_equal(flat.numpy(), new)
    back = np.frombuffer(mmap.mmap(-1, 4 * entries), np.float32)
    file.read(0, back)
    assert np.array_equal(back, new)
    assert file.direct in used
    assert (file.descriptor in used) == (trouble is not None)
    used.clear()
    file.read(4, back[1:])  # neither begins at a page
    file.read(0, back[:7])
    assert used == [file.descriptor] * 2
    assert np.array_equal(back, new)


@LINUX
def test_a_file_is_closed_when_nobody_sees_its_vectors():
    before = len(os.listdir("/proc/self/fd"))
    made = allocate(2, Params({"w": torch.zeros(5000)}).layout, most=0)
    view = made.pop()["w"][10:]
    del made
    assert len(os.listdir("/proc/self/fd")) > before
    assert location_of(view) is not None
    del view
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(OSError, match=r"."):
        allocate(1 << 40, Params({"w": torch.zeros(5000)}).layout, most=0)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("memory", ["0", "1000000"])
def test_sums_of_vectors_are_by_client_and_lie_where_they_fit(monkeypatch, memory):
    monkeypatch.setenv("FEDFM_MEMORY", memory)
    theta = Vectors({i: Params({"w": torch.randn(50)}) for i in "abc"})
    tau = {i: Params({"w": torch.randn(50)}) for i in "cbx"}
    summed, apart = theta + tau, theta - tau
    assert list(summed) == list(apart) == ["c", "b"]
    for i in "cb":
        assert summed[i].sha256() == (theta[i] + tau[i]).sha256()
        assert apart[i].sha256() == (theta[i] - tau[i]).sha256()
        assert (location_of(summed[i].flats[torch.float32]) is not None) == (memory == "0")
    assert {i: x.sha256() for i, x in theta.less(theta["a"]).items()} == {
        i: (x - theta["a"]).sha256() for i, x in theta.items()
    }
    half = Vectors({i: Params({"w": x["w"].bfloat16()}) for i, x in theta.items()})
    wide = half.cast(theta)
    assert all(wide[i]["w"].tolist() == half[i]["w"].float().tolist() for i in "abc")
    assert all(x is y for x, y in zip(summed.cast(theta).values(), summed.values(), strict=True))  # stays in its file


def test_the_environment_sets_the_memory_limit(monkeypatch):
    monkeypatch.delenv("FEDFM_MEMORY", raising=False)
    assert out_of_core.limit() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    monkeypatch.setenv("FEDFM_MEMORY", "4096")
    assert out_of_core.limit() == 4096
    monkeypatch.setenv("FEDFM_MEMORY", "4 GB")
    with pytest.raises(InputError, match=r'FEDFM_MEMORY = "4 GB": expected a number of bytes'):
        out_of_core.limit()


@LINUX
def test_a_large_value_is_read_back_as_views_of_its_file_and_a_small_one_as_copies(monkeypatch, tmp_path):
    drawn = {f"c{i}": Params({"w": torch.randn(1000), "n": torch.tensor(i)}) for i in range(3)}
    value = {"round": 1, "state": drawn, "odd": torch.tensor([True]), "after": Params({"w": torch.randn(9)})}
    path = tmp_path / "x.safetensors"
    storage.save(path, value)

    def read(limit: int) -> dict:
        monkeypatch.setenv("FEDFM_MEMORY", str(limit))
        found = storage.load(path)
        assert found is not None
        assert found["round"] == 1
        assert found["odd"].tolist() == [True]
        assert {c: x.sha256() for c, x in found["state"].items()} == {c: x.sha256() for c, x in drawn.items()}
        assert found["after"].sha256() == value["after"].sha256()  # behind one byte: no address for a float
        return found

    mapped = read(0)
    floats = Params({"w": mapped["state"]["c1"]["w"]}).layout
    vector = Params.from_flat(floats, {torch.float32: mapped["state"]["c1"].flats[torch.float32]})
    assert file_of(vector) == str(path)
    copied = read(path.stat().st_size)
    vector = Params.from_flat(floats, {torch.float32: copied["state"]["c1"].flats[torch.float32]})
    assert file_of(vector) != str(path)

    before = path.read_bytes()
    mapped["state"]["c0"]["w"].zero_()  # whoever writes, writes to memory of its own
    assert path.read_bytes() == before
    path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    assert storage.load(path) is None
    path.write_bytes(before[:-1])
    assert storage.load(path) is None
    path.write_bytes(b"")
    assert storage.load(path) is None


def test_a_saved_value_is_a_safetensors_file(tmp_path):
    from safetensors import safe_open

    storage.save(tmp_path / "x.safetensors", Params({"w": torch.arange(3.0)}))
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert list(file.keys()) == ["data"]
        assert file.get_tensor("data").view(torch.float32).tolist() == [0.0, 1.0, 2.0]
        assert json.loads(file.metadata()["head"]) == {"p": [["w", "float32", [3]]]}


def test_a_payload_over_the_limit_is_refused_and_a_checkpoint_of_that_size_is_read(monkeypatch, tmp_path):
    from fedfm.core.wire import limits, payload
    from fedfm.errors import ClientFault

    monkeypatch.setattr(limits, "MAX_BYTES", 10)
    value = Params({"w": torch.arange(3.0)})
    head, pieces = payload.encode(value)
    with pytest.raises(ClientFault, match="over the limit"):
        payload.decode(head, b"".join(pieces))
    storage.save(tmp_path / "x.safetensors", value)
    assert storage.load(tmp_path / "x.safetensors", Params)["w"].tolist() == [0.0, 1.0, 2.0]


RUN = """
import json, os, signal, sys
from pathlib import Path
import numpy as np
import torch
from torch import nn
import fedfm
from fedfm.linalg import column_blocks
from fedfm.linalg.pairwise import mix
from fedfm.linalg.params import Params
from fedfm.runtime.run_directory import Run

column_blocks.WINDOWS = 1 << 22  # of four vectors
small = [Params({"w": torch.randn(1 << 17)}) for _ in range(4)]
mix(np.ones((1, 4, 4)), small)  # loads the libraries of compiled loops, whose memory is not freed
del small

def anonymous():
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("RssAnon"))

K, peak, begun = 24, 0, 0
torch.manual_seed(0)
x = torch.randn(4 * K, 32)
clients = {f"c{i:02}": list(zip(x[4 * i : 4 * i + 4], torch.tensor([0, 1, 0, 1]))) for i in range(K)}
module = nn.Sequential(nn.Linear(32, 8192), nn.ReLU(), nn.Linear(8192, 2))  # 1.1 MiB

commit = Run.commit
def watched(self, t, *args, **keys):  # here a round's replies, task vectors and aggregates are all there
    global begun, peak
    commit(self, t, *args, **keys)
    begun, peak = begun if t else anonymous(), max(peak, anonymous())
    if [t] == [int(n) for n in sys.argv[2:]]:
        os.kill(os.getpid(), signal.SIGKILL)
Run.commit = watched
found = fedfm.federate(module, clients=clients, loss=nn.functional.cross_entropy, method="fedbip", rounds=2,
    local={"learning_rate": 0.1}, out=sys.argv[1], run={"workers": 1})
print(json.dumps([found["params_sha256"], peak - begun, sum(p.numel() * 4 for p in module.parameters())]))
"""


@LINUX
@pytest.mark.proof
def test_a_run_whose_vectors_do_not_fit_keeps_few_in_memory_and_ends_with_the_same_bits(tmp_path):
    """24 clients, three vectors a client in the state: with files memory grows by a few vectors, not by 24."""
    environment = {"PYTHONPATH": str(Path(fedfm.__file__).parents[1]), "PATH": "/usr/bin:/bin"}

    def process(name: str, *killed: str, **extra: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-c", RUN, str(tmp_path / name), *killed],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env=environment | {"TMPDIR": str(tmp_path)} | extra,
        )

    def run(name: str, **extra: str) -> tuple[str, float]:
        out = process(name, **extra)
        assert out.returncode == 0, out.stderr[-2000:]
        digest, grown, vector = json.loads(out.stdout)
        return digest, grown / vector

    digest, vectors = run("memory")
    again, few = run("files", FEDFM_MEMORY="0")
    assert again == digest
    assert vectors > 72
    assert few < 36
    assert process("killed", "1", FEDFM_MEMORY="0").returncode == -9  # after the first round's commit
    resumed, _ = run("killed", FEDFM_MEMORY="0")
    assert resumed == digest
