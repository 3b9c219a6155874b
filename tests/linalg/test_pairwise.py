"""Inner products and mixtures of all vectors against naive loops in float64; threads, files larger than memory."""

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedfm
from fedfm.linalg import column_blocks, out_of_core, pairwise
from fedfm.linalg.out_of_core import keep_all
from fedfm.linalg.pairwise import gram, mix
from fedfm.linalg.params import Params

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)
EPS = {d: torch.finfo(d).eps for d in DTYPES if d.is_floating_point}
SMALL = {
    "BLOCK": 8,
    "ENTRIES": 64,
    "STRETCH": 16,
    "SHORT": 0,
}  # several of everything


def make_small(patch: pytest.MonkeyPatch) -> None:
    """Blocks, stretches and layers of a few entries, so that small vectors have many."""
    for name, value in SMALL.items():
        for module in (column_blocks, pairwise):
            if hasattr(module, name):
                patch.setattr(module, name, value)


def drawn(seed, count, shapes, dtypes=(torch.float32,), near=0.0):
    """``near`` 1: all close to one vector."""
    rng = np.random.default_rng(seed)
    common = [rng.normal(size=shape) for shape in shapes]
    return [
        Params(
            {
                f"l{i}": torch.as_tensor(4 * near * c + rng.normal(size=c.shape)).to(dtypes[i % len(dtypes)])
                for i, c in enumerate(common)
            }
        )
        for _ in range(count)
    ]


def numbers(x, names):
    """Its floating-point entries in float64, of no more than the naive loop's own kind of arithmetic."""
    return np.concatenate([x[n].double().flatten().numpy() for n in names if x[n].is_floating_point()] or [np.zeros(0)])


def naive_gram(vectors, layers, centre=False):
    found = []
    for names in layers:
        rows = [numbers(x, names) for x in vectors]
        if centre:
            rows = [r - r.mean() if len(r) else r for r in rows]
        found.append([[float(np.dot(a, b)) for b in rows] for a in rows])
    return np.array(found)


def cosines(products):
    norms = np.sqrt(np.diagonal(products, axis1=1, axis2=2))
    return products / (norms[:, :, None] * norms[:, None, :])


def same(a, b):
    return all(torch.equal(f.view(torch.uint8), b.flats[d].view(torch.uint8)) for d, f in a.flats.items())


cases = st.tuples(
    st.integers(0, 99),
    st.integers(1, 5),
    st.lists(st.lists(st.integers(0, 6), max_size=2).map(tuple), min_size=1, max_size=6),
    st.lists(st.integers(0, 3), min_size=6, max_size=6),  # the layer of each tensor; 3: of none
    st.booleans(),
)


def split(vectors, where, reverse):
    """Names of three layers, not next to each other and in either order."""
    names = list(vectors[0])
    return [
        [n for n, w in list(zip(names, where, strict=False))[:: -1 if reverse else 1] if w == at] for at in range(3)
    ]


@settings(deadline=None, max_examples=60)
@given(cases, st.booleans())
def test_products_are_those_of_a_loop_in_float64(case, centre):
    seed, count, shapes, where, reverse = case
    vectors = drawn(seed, count, shapes, DTYPES)
    layers = split(vectors, where, reverse)
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        got, again = gram(vectors, layers, centre=centre), gram(vectors, layers, centre=centre, threads=1)
        whole = gram(vectors, centre=centre)
    assert got.dtype == np.float64
    assert got.tobytes() == again.tobytes()
    np.testing.assert_array_equal(got, got.transpose(0, 2, 1))
    np.testing.assert_allclose(got, naive_gram(vectors, layers, centre), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(whole, naive_gram(vectors, [list(vectors[0])], centre), rtol=1e-5, atol=1e-4)


@settings(deadline=None, max_examples=30)
@given(cases, st.booleans(), st.booleans(), st.sampled_from([None, 1, 3]))
def test_vectors_in_files_give_the_bits_of_vectors_in_memory(case, centre, added, threads):
    seed, count, shapes, where, reverse = case
    vectors, base = drawn(seed, count, shapes, DTYPES), drawn(seed + 1, count, shapes, DTYPES)
    layers = split(vectors, where, reverse)
    weights = np.random.default_rng(seed).normal(size=(len(layers), count, count))

    def both(vectors, base, most):
        mixed = mix(weights, vectors, layers, base if added else None, threads=threads, most=most)
        return gram(vectors, layers, centre=centre, threads=threads), mixed

    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        patch.setattr(column_blocks, "WINDOWS", 16 * 8 * count)  # a window or two on a thread
        patch.setattr(out_of_core, "FILE", 1 << 12)
        products, mixed = both(vectors, base, None)
        again, filed = both(keep_all(vectors, most=0), keep_all(base, most=0), 0)
    assert products.tobytes() == again.tobytes()
    assert all(map(same, mixed, filed))


@settings(deadline=None, max_examples=60)
@given(cases, st.integers(1, 4), st.booleans())
def test_mixtures_are_those_of_a_loop_in_float64(case, rows, added):
    seed, count, shapes, where, reverse = case
    vectors, base = drawn(seed, count, shapes, DTYPES), drawn(seed + 1, rows if added else count, shapes, DTYPES)
    layers = split(vectors, where, reverse)
    rows = rows if added else count
    weights = np.random.default_rng(seed).normal(size=(len(layers), rows, count))
    onto = base if added else None
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        got, again = mix(weights, vectors, layers, onto), mix(weights, vectors, layers, onto, threads=1, most=0)
    assert len(got) == rows
    layer = {n: at for at, names in enumerate(layers) for n in names}
    for i, x in enumerate(got):
        assert same(x, again[i])  # on one thread, and in a file
        assert x.layout is vectors[0].layout
        own = base[i] if added else vectors[i]
        for n, t in x.items():
            if n not in layer or not t.is_floating_point():
                assert torch.equal(t, own[n])
                continue
            terms = [w * v[n].double() for w, v in zip(weights[layer[n], i], vectors, strict=True)]
            want = sum(terms) + (own[n].double() if added else 0)
            size = sum(term.abs() for term in terms) + own[n].double().abs()
            assert ((t.double() - want).abs() <= (EPS[t.dtype] + 2**-20) * size + 1e-7).all()


def test_numbers_by_hand():
    tau = [Params({"a": torch.tensor([x]), "b": torch.tensor([y])}) for x, y in ((3.0, 0.0), (3.0, 4.0), (0.0, -2.0))]
    products = gram(tau)
    np.testing.assert_allclose(cosines(products)[0], [[1, 0.6, 0], [0.6, 1, -0.8], [0, -0.8, 1]], atol=1e-15)
    p = np.array([[[0.625, 0.375, 0], [0.375, 0.625, 0], [0, 0, 1]]])
    assert [[float(m["a"]), float(m["b"])] for m in mix(p, tau)] == [[3, 1.5], [3, 2.5], [0, -2]]
    assert gram(tau, [["a"], ["b"]]).tolist() == [[[9, 9, 0], [9, 9, 0], [0] * 3], [[0] * 3, [0, 16, -8], [0, -8, 4]]]
    swapped = mix(np.array([np.eye(3)[[1, 0, 2]]]), tau, [["b"]], onto=tau)  # b of another is added, a stays
    assert [[float(m["a"]), float(m["b"])] for m in swapped] == [[3, 4], [3, 4], [0, -4]]


@pytest.mark.parametrize("entries", [700, 5000, 65_535, 65_536, 200_000])
@pytest.mark.parametrize("near", [0.0, 1.0])
def test_cosines_are_right_to_a_ten_millionth(entries, near):
    vectors = drawn(entries, 6, [(entries,)], near=near)
    layers = [["l0"]]
    for centre in (False, True):
        got, want = cosines(gram(vectors, centre=centre)), cosines(naive_gram(vectors, layers, centre))
        assert np.abs(got - want).max() <= 1e-7


@pytest.mark.parametrize("most", [None, 0])
def test_copies_of_one_onto_give_the_bits_of_one_object(most):
    """A run whose vectors are in files, or that is resumed, has copies where another run has one object."""
    rng = torch.Generator().manual_seed(0)
    vectors = [Params({"w": torch.randn(9000, generator=rng)}) for _ in range(24)]
    weights = np.random.default_rng(0).normal(size=(1, 24, 24))
    start = vectors[0] + vectors[1]
    copies = [start.map(torch.clone) for _ in range(24)]
    one, other = mix(weights, vectors, onto=[start] * 24), mix(weights, vectors, onto=copies, most=most)
    assert [x.sha256() for x in one] == [x.sha256() for x in other]


def test_a_mean_that_dwarfs_the_spread_does_not_spoil_pearson():
    rng = np.random.default_rng(0)
    vectors = [Params({"w": torch.as_tensor(1000 + rng.normal(size=100_000)).float()}) for _ in range(4)]
    got, want = (cosines(f(vectors, [["w"]], centre=True)) for f in (gram, naive_gram))
    assert np.abs(got - want).max() <= 1e-7


@pytest.mark.parametrize("count", [3, 70])
def test_bits_depend_neither_on_threads_nor_on_torchs(count):
    vectors = drawn(3, count, [(100, 1000), (7,), (20_001,)], dtypes=(torch.float32, torch.bfloat16))
    weights = np.random.default_rng(0).normal(size=(1, count, count))
    one = gram(vectors, threads=1), mix(weights, vectors, onto=vectors, threads=1)
    before = torch.get_num_threads()
    for threads, torchs in ((2, 1), (3, 2), (None, 2)):
        torch.set_num_threads(torchs)
        try:
            products, mixed = gram(vectors, threads=threads), mix(weights, vectors, onto=vectors, threads=threads)
        finally:
            torch.set_num_threads(before)
        assert products.tobytes() == one[0].tobytes()
        assert all(map(same, mixed, one[1]))


def test_vectors_with_gaps_between_their_entries_are_read_as_such():
    vectors = drawn(3, 4, [(140_000,)])
    layout = Params({"l0": torch.zeros(70_000)}).layout
    gaps = [Params.from_flat(layout, {torch.float32: x["l0"][::2]}) for x in vectors]
    whole = [Params({"l0": x["l0"]}) for x in gaps]
    weights = np.random.default_rng(4).normal(size=(1, 4, 4))
    assert gram(gaps).tobytes() == gram(whole).tobytes()
    assert all(map(same, mix(weights, gaps), mix(weights, whole)))


def test_the_identity_gives_each_its_own_bits():
    vectors = drawn(1, 5, [(60, 70), (9,)], dtypes=(torch.float32, torch.float16))
    base = drawn(2, 5, [(60, 70), (9,)], dtypes=(torch.float32, torch.float16))
    assert all(map(same, mix(np.eye(5)[None], vectors), vectors))
    for got, x, y in zip(mix(np.eye(5)[None], vectors, onto=base), vectors, base, strict=True):
        assert torch.equal(got["l0"], y["l0"] + x["l0"])


def test_zero_vectors_one_client_and_what_is_not_finite():
    (x,) = drawn(0, 1, [(5, 4)])
    assert gram([x])[0, 0, 0] == pytest.approx(x.dot(x))
    assert same(mix(np.ones((1, 1, 1)), [x])[0], x)
    products = gram([x, x * 0.0, x * float("nan")])[0]
    assert products[1, :2].tolist() == [0, 0]
    assert np.isnan(products[2]).all()
    assert np.isfinite(products[:2, :2]).all()
    assert mix(np.zeros((1, 0, 1)), [x]) == []
    empty = Params({"n": torch.tensor([3]), "e": torch.zeros(0)})
    assert gram([empty, empty]).tolist() == [[[0.0, 0.0], [0.0, 0.0]]]
    assert same(mix(np.ones((1, 1, 1)), [empty])[0], empty)


def test_vectors_of_different_layouts_are_refused():
    x, y = drawn(0, 2, [(2,), (3,)])
    weights = np.ones((1, 2, 2))
    for other, error in ((Params({"l0": x["l0"]}), KeyError), (Params({"l0": x["l1"], "l1": x["l1"]}), ValueError)):
        for call in (
            lambda other=other: gram([x, other]),
            lambda other=other: mix(weights, [x, other]),
            lambda other=other: mix(weights, [x, y], onto=[x, other]),
        ):
            with pytest.raises(error):
                call()
    with pytest.raises(KeyError, match="no such parameters"):
        gram([x, y], [["l0", "head"]])
    with pytest.raises(ValueError, match="in two layers"):
        mix(np.ones((2, 2, 2)), [x, y], [["l0"], ["l1", "l0"]])
    with pytest.raises(ValueError, match="no vectors"):
        gram([])
    for shape in ((2, 2), (2, 2, 2), (1, 2, 3)):
        with pytest.raises(ValueError, match="expected"):
            mix(np.ones(shape), [x, y])
    with pytest.raises(ValueError, match="onto has 1 vectors, but the weights have 2 rows"):
        mix(weights, [x, y], onto=[x])
    with pytest.raises(ValueError, match="outside the layers"):
        mix(np.ones((1, 3, 2)), [x, y], [["l0"]])


STREAMED = """
import resource, sys
import numpy as np, torch
from fedfm.linalg import column_blocks
from fedfm.linalg.pairwise import gram, mix
from fedfm.linalg.params import Params
from fedfm.linalg.out_of_core import keep_all

column_blocks.WINDOWS = 1 << 23
count, entries = 16, 2 << 20  # 128 MiB of vectors, and of results
def drawn(k):
    return np.random.default_rng(k).normal(size=entries).astype(np.float32)
vectors = keep_all((Params({"w": torch.from_numpy(drawn(k))}) for k in range(count)), most=0)
weights = np.random.default_rng(99).normal(size=(1, count, count))
small = [Params({"w": torch.randn(1 << 19)}) for _ in range(16)]
gram(small, threads=1), mix(weights, small, threads=1)  # libraries take what they need of each thread for good
del small
taken = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))
before = resource.getrlimit(resource.RLIMIT_DATA)
resource.setrlimit(resource.RLIMIT_DATA, (taken + (48 << 20), before[1]))  # memory that no file backs
try:
    np.empty((count, entries), np.float32)
except MemoryError:
    pass
else:
    raise SystemExit("the limit does not bite")
products = gram(vectors, threads=1)
mixed = mix(weights, vectors, onto=vectors, threads=1, most=1 << 20)
resource.setrlimit(resource.RLIMIT_DATA, before)
for i, k in ((0, 0), (3, 11), (15, 14)):
    want = float(np.dot(drawn(i).astype(np.float64), drawn(k).astype(np.float64)))
    assert abs(products[0, i, k] - want) < 1e-7 * entries, (i, k)
for here in (slice(0, 100), slice(1 << 20, (1 << 20) + 100), slice(entries - 100, entries)):
    x = np.stack([v["w"][here].numpy() for v in vectors]).astype(np.float64)
    for i in (0, 15):
        assert np.abs(mixed[i]["w"][here].numpy() - x[i] - weights[0, i] @ x).max() < 1e-5
print("done")
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's limit on memory without a file")
@pytest.mark.proof
def test_vectors_and_results_larger_than_memory_are_streamed(tmp_path):
    source = str(Path(fedfm.__file__).parents[1])
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(STREAMED)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={"PYTHONPATH": source, "TMPDIR": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )
    assert out.stdout == "done\n", out.stderr[-2000:]
    assert not list(tmp_path.iterdir())  # files have no name
