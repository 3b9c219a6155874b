"""Encrypted inference: linear layers on residues against SEAL's loop and CKKSTensor.mm, and a whole transformer block.

    OMP_NUM_THREADS=1 python benchmarks/encrypted_block.py
    OMP_NUM_THREADS=1 python benchmarks/encrypted_block.py --quick
    OMP_NUM_THREADS=1 python benchmarks/encrypted_block.py --profile [--quick]

One core. Linear layers: 128 x 128, 4,096 samples in the slots; SEAL's loop (`multiply_plain`, then `add`) and TenSEAL's
`CKKSTensor.mm` run a few of the 128 rows, and their seconds are multiplied. The block: 16 tokens of 256 samples,
d = 128, an MLP of 256, 4 heads, degree 8192, refreshes as messages between two sides of one process; once with our
matrix products and once with SEAL's loop in full. Then batches of a small block in one process and in two.
With `--profile`: where a block of ViT-tiny's shape (d = 192, 64 tokens; `--quick`: d = 48) spends its CPU seconds.
"""

from __future__ import annotations

import math
import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import common
import numpy as np
import tenseal
from tenseal import sealapi
from threadpoolctl import threadpool_limits

from fedfm.encrypted.ckks import matrices, modular_kernels, seal
from fedfm.encrypted.ckks.ciphertexts import Ciphertexts
from fedfm.encrypted.ckks.refresh import DistanceLedger, Mask, Masking, least_limbs
from fedfm.encrypted.ckks.remote_refresh import RemoteRefresh, answer_refresh, encrypt_message
from fedfm.encrypted.ckks.ring import Parameters, Ring
from fedfm.encrypted.ckks.transformer_block import EncryptedBlock, Packing
from fedfm.encrypted.ckks.wire import Channel
from fedfm.encrypted.inference.cost_estimate import plan
from fedfm.encrypted.inference.model_owner import KeyHolder
from fedfm.encrypted.inference.worker_pool import EncryptedBatch, run_all
from fedfm.encrypted.student.polynomials import Exponential, Inverse, InverseSquareRoot, Polynomial, Quadratic
from fedfm.linalg.kernels import buffers

PARAMETERS, BOUND = Parameters(), 64.0
PLANNED = 10**5  # refreshed ciphertexts of a run


class Numbers(np.ndarray):
    """An array with a square."""

    def square(self) -> Any:
        return self * self


def at(polynomial: Polynomial, x: np.ndarray) -> np.ndarray:
    """The polynomial's values."""
    return np.asarray(polynomial.evaluate(x.view(Numbers)))


EXP, INVERSE = Exponential(2, 3), Inverse(4, scale=1.0)
GELU = Quadratic(0.2116, 0.5, 0.0705)  # for normal numbers


def random_block(d: int, m: int, heads: int, layout: Packing) -> tuple[EncryptedBlock, np.ndarray, np.ndarray]:
    """A block of random weights, tokens, and what it gives in the clear; polynomials fit the measured intervals."""
    rng = np.random.default_rng(0)
    shapes = dict.fromkeys(("query", "key", "value", "output"), (d, d)) | {"up": (m, d), "down": (d, m)}
    w = {name: rng.normal(0, 1 / math.sqrt(shape[1]), shape) for name, shape in shapes.items()}
    w |= {f"{name}_bias": rng.normal(0, 0.1, shape[0]) for name, shape in shapes.items()}
    w["query"] /= math.sqrt(d // heads)
    for name in ("output", "down", "output_bias", "down_bias"):
        w[name] = w[name] - w[name].mean(0)
    x = rng.normal(size=(layout.samples, layout.tokens, d)) * rng.uniform(0.8, 1.25, (layout.samples, layout.tokens, 1))
    x -= x.mean(-1, keepdims=True)

    def split(v: np.ndarray) -> np.ndarray:
        return v.reshape(*v.shape[:2], heads, -1).transpose(0, 2, 1, 3)

    def fit_polynomial(v: np.ndarray) -> tuple[np.ndarray, Polynomial]:
        variance = (v**2).mean(-1, keepdims=True)
        root = InverseSquareRoot(2, (variance.min() / 1.1, variance.max() * 1.1))
        return v * at(root, variance), root

    y, first = fit_polynomial(x)
    q, k, v = (split(y @ w[name].T + w[f"{name}_bias"]) for name in ("query", "key", "value"))
    e = at(EXP, q @ (k - k.mean(2, keepdims=True)).transpose(0, 1, 3, 2))
    rows = e.sum(-1, keepdims=True)
    scales = 2 / (rows.min((0, 2, 3)) / 1.1 + rows.max((0, 2, 3)) * 1.1)
    c = scales[None, :, None, None]
    p = e * at(INVERSE, rows * c) * c
    z = x + (p @ v).transpose(0, 2, 1, 3).reshape(x.shape) @ w["output"].T + w["output_bias"]
    y, second = fit_polynomial(z)
    want = z + at(GELU, y @ w["up"].T + w["up_bias"]) @ w["down"].T + w["down_bias"]
    return EncryptedBlock(layout, heads, w, (first, second), EXP, INVERSE, scales, GELU), x, want


class Session:
    """Client and server in one process, joined by bytes; the client's seconds are counted apart."""

    def __init__(self, layout: Packing) -> None:
        floor = least_limbs(PARAMETERS, PLANNED, BOUND)
        self.client, self.seconds, self._floor = seal.ClientKeys(PARAMETERS), 0.0, floor
        public = self.client.public(layout.rotations)
        self.key_bytes = len(public)
        self.server = seal.ServerKeys(PARAMETERS, public, floor=floor)
        self._here, self._there = (Channel(PARAMETERS, bytes(32), bytes(16), side) for side in ("client", "server"))
        self.refresh = RemoteRefresh(Masking(BOUND), self._there, self._answer)
        self.server.refresh = self.refresh
        self.sent = 0

    def _answer(self, message: bytes) -> bytes:
        start = time.process_time()
        out = answer_refresh(self.client, self._here, message, self._floor)
        self.seconds += time.process_time() - start
        return out

    def send(self, slots: np.ndarray) -> Ciphertexts:
        message = encrypt_message(self.client, self._here, slots)
        self.sent += len(message)
        residues, scale = self._there.unpack(message, limbs=PARAMETERS.limbs, count=len(slots))
        return Ciphertexts(residues.view(np.uint64), scale, self.server)


def seal_products(rounded: np.ndarray, x: np.ndarray, server: seal.ServerKeys) -> np.ndarray:
    """An integer matrix times ciphertexts by SEAL's `multiply_plain` and `add`, entry by entry."""
    library, count = server._library, x.shape[2]
    encoder, plain, part = sealapi.CKKSEncoder(library.context), sealapi.Plaintext(), library.empty()
    inputs = [library._from_stream(residues, 2.0) for residues in x]
    out = np.empty((len(rounded), *x.shape[1:]), np.int64)
    for i, row in enumerate(rounded):
        total = None
        for weight, ciphertext in zip(row, inputs, strict=True):
            if weight:
                encoder.encode(float(weight), library.ids[count], 1.0, plain)
                if total is None:
                    total = library.empty()
                    library.evaluator.multiply_plain(ciphertext, plain, total)
                else:
                    library.evaluator.multiply_plain(ciphertext, plain, part)
                    library.evaluator.add_inplace(total, part)
        out[i] = library.read(total)
    return out


@contextmanager
def by_loop(server: seal.ServerKeys) -> Iterator[None]:
    """Linear layers by SEAL's loop."""
    ours = matrices.matrix_product
    matrices.matrix_product = lambda rounded, x, ring: seal_products(rounded, x, server)
    try:
        yield
    finally:
        matrices.matrix_product = ours


def linear_layers(quick: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of the first table, and goals."""
    n, rows = 128, 2 if quick else 8
    rng = np.random.default_rng(0)
    client = seal.ClientKeys(PARAMETERS)
    server = seal.ServerKeys(PARAMETERS, client.public())
    values = rng.normal(size=(n, PARAMETERS.slots))
    x = Ciphertexts(client.encrypt(values).view(np.uint64), PARAMETERS.scale, server).at(4)
    weight = rng.normal(0, 1 / math.sqrt(n), (n, n))
    rounded = np.rint(weight * PARAMETERS.primes[3])
    context = tenseal.context(
        tenseal.SCHEME_TYPE.CKKS,
        PARAMETERS.degree,
        coeff_mod_bit_sizes=[*PARAMETERS.bits, PARAMETERS.special],
        n_threads=1,
    )
    context.global_scale = PARAMETERS.scale
    tensor = tenseal.ckks_tensor(context, values.T[:, None], batch=True)
    few = tenseal.plain_tensor(weight[:rows].T)
    found: dict[str, Any] = {}
    times = common.interleave(
        {
            "residues": lambda: found.update(ours=matrices.matrix_product(rounded, x.residues, server.ring)),
            "loop": lambda: found.update(loop=seal_products(rounded[:rows], x.residues, server)),
            "tensor": lambda: found.update(tensor=tensor.mm(few)),
            "layer": lambda: found.update(layer=matrices.linear(weight, x)),
        },
        1 if quick else 5,
    )
    if not np.array_equal(found["ours"][:rows], found["loop"]):
        raise SystemExit("the two products differ")
    loop = [(w * n / rows, c * n / rows) for w, c in times["loop"]]
    tensors = [(w * n / rows, c * n / rows) for w, c in times["tensor"]]
    layer = client.decrypt(found["layer"].residues, found["layer"].scale)
    theirs = np.array(found["tensor"].decrypt().tolist())[:, 0].T
    want = weight @ values
    table = [
        {
            "128 x 128, 128 ciphertexts": "residues",
            "CPU s": common.median(times["residues"]),
            "loop takes": 1.0,
            "largest error": None,
        },
        {
            "128 x 128, 128 ciphertexts": "residues, rescaled",
            "CPU s": common.median(times["layer"]),
            "loop takes": None,
            "largest error": float(np.abs(layer - want).max()),
        },
        {
            "128 x 128, 128 ciphertexts": f"multiply_plain ({rows} rows)",
            "CPU s": common.median(loop),
            "loop takes": common.ratio(loop, times["residues"]),
            "largest error": None,
        },
        {
            "128 x 128, 128 ciphertexts": f"CKKSTensor.mm ({rows} rows)",
            "CPU s": common.median(tensors),
            "loop takes": common.ratio(tensors, times["layer"]),
            "largest error": float(np.abs(theirs - want[:rows]).max()),
        },
    ]
    for row in table:
        row["their time / ours"] = row.pop("loop takes")
    goals = [
        common.goal("times a loop of multiply_plain", common.ratio(loop, times["residues"])["median"], least=8),
        common.goal("times CKKSTensor.mm", common.ratio(tensors, times["layer"])["median"], least=20),
    ]
    return table, goals


def whole_block(quick: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """Rows of the second table, goals and notes."""
    d, m, heads = (16, 32, 4) if quick else (128, 256, 4)
    layout = Packing(PARAMETERS, 16)
    block, x, want = random_block(d, m, heads, layout)
    session, table, seconds = Session(layout), [], []
    for name in ("residues", "loop of multiply_plain"):
        encrypted, before, refresh = session.send(layout.pack(x)), session.seconds, session.refresh
        bytes_before, messages = refresh.bytes_up + refresh.bytes_down, refresh.messages
        start = time.process_time()
        if name == "residues":
            out = block(encrypted)
        else:
            with by_loop(session.server):
                out = block(encrypted)
        spent, client = time.process_time() - start, session.seconds - before
        seconds.append(spent)
        slots = layout.unpack(session.client.decrypt(out.residues, out.scale), layout.samples)
        table.append(
            {
                f"block, d = {d}": name,
                "server ms a sample": 1e3 * (spent - client) / layout.samples,
                "client ms a sample": 1e3 * client / layout.samples,
                "MB a sample": (refresh.bytes_up + refresh.bytes_down - bytes_before) / layout.samples / 1e6,
                "messages": refresh.messages - messages,
                "peak GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
                "largest error": float(np.abs(slots - want).max()),
                "rms error": float(np.sqrt(((slots - want) ** 2).mean())),
            }
        )
    goals = [
        common.goal("times the whole block with the loop", seconds[1] / seconds[0], least=2),
        common.goal("largest error of a block", table[0]["largest error"], most=1e-3),
        common.goal("rms error of a block", table[0]["rms error"], most=2e-4),
        common.goal("peak GB of server and client", table[0]["peak GB"], most=2.5),
    ]
    notes = [
        f"Both blocks: {session.refresh.masking.ledger}.",
        f"Keys: {session.key_bytes / 1e6:.1f} MB once. Encrypted rows: {session.sent / 2 / layout.samples / 1e3:.0f} kB"
        " a sample. Standard deviation of the output: "
        f"{want.std():.2f}.",
    ]
    return table, goals, notes


@dataclass(frozen=True)
class Layer:
    """A block of random weights, for timing alone."""

    weights: dict[str, np.ndarray]
    heads: int = 4
    norms: Any = field(default_factory=lambda: (InverseSquareRoot(2, (0.3, 2.0)), InverseSquareRoot(2, (0.3, 2.0))))
    exponential: Any = field(default_factory=Exponential)
    inverse: Any = field(default_factory=lambda: INVERSE)
    inverse_scales: Any = field(default_factory=lambda: np.full(4, 1 / 16))
    gelu: Any = field(default_factory=lambda: GELU)
    centred_keys: bool = True


@dataclass(frozen=True)
class Model:
    """One block behind an embedding of random weights."""

    embedding: np.ndarray
    bias: np.ndarray
    positions: np.ndarray
    blocks: tuple[Layer, ...]
    scales: np.ndarray
    ranges: np.ndarray
    bound: float = BOUND
    class_token: bool = False


class Relay:
    """A holder in this process, for several batches at once."""

    def __init__(self, features: int) -> None:
        self.holder, self._rows = KeyHolder.new(16), np.random.default_rng(0).normal(size=(256, 16, features))

    def rows(self, job: EncryptedBatch) -> bytes:
        self.holder.begin(job.session, job.key)
        return self.holder.rows(self._rows)

    def refresh(self, job: EncryptedBatch, message: bytes) -> bytes:
        return self.holder.refresh(message)

    def release(self, job: EncryptedBatch, block: int, message: bytes) -> None:
        """Ignore the states: random weights give numbers of any size."""

    def save(self, job: EncryptedBatch, checkpoint: bytes) -> None:
        """Ignore the checkpoint."""


def several_processes(quick: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """Rows of the third table, goals and notes."""
    d, m, features, batches = (16, 32, 12, 2) if quick else (32, 64, 12, 4)
    rng = np.random.default_rng(0)
    shapes = dict.fromkeys(("query", "key", "value", "output"), (d, d)) | {"up": (m, d), "down": (d, m)}
    w = {name: rng.normal(0, 0.3 / math.sqrt(shape[1]), shape) for name, shape in shapes.items()}
    w |= {f"{name}_bias": rng.normal(0, 0.1, shape[0]) for name, shape in shapes.items()}
    embedding, one = rng.normal(size=(d, features)) / math.sqrt(features), np.ones(1)
    model = Model(embedding, np.zeros(d), np.zeros((16, d)), (Layer(w),), one, 16 * one)
    relay = Relay(features)
    public = relay.holder.public()
    table, walls, load = [], {1: [], 2: []}, os.getloadavg()[0]
    for count in (1, 2) if quick else (1, 2, 2, 1):
        ledger = DistanceLedger()
        jobs = [EncryptedBatch("a", b, public, os.urandom(16), os.urandom(32), ledger) for b in range(batches)]
        before = sum(os.times()[:4])
        start = time.perf_counter()
        if failed := run_all(jobs, relay, count, folded=model, released="class"):
            raise SystemExit(str(failed))
        walls[count].append(time.perf_counter() - start)
        table.append(
            {
                f"{batches} batches, d = {d}": f"{count} process{'es' * (count > 1)}",
                "wall s": walls[count][-1],
                "CPU s": sum(os.times()[:4]) - before,
            }
        )
    ratio = float(np.median(walls[1]) / np.median(walls[2]))
    note = f"Processes: load average before them {load:.1f} on {os.cpu_count()} cores."
    return table, [common.goal("two processes, times one", ratio, least=1.8)], [note]


class Profile:
    """CPU seconds by operation; an operation inside another one counts for itself only."""

    def __init__(self) -> None:
        self.seconds, self.calls = Counter[str](), Counter[str]()
        self._open: list[float] = []

    @contextmanager
    def watch(self, places: dict[str, list[tuple[Any, str]]]) -> Iterator[None]:
        """Time functions: name of an operation -> (owner of a function, its name) of each."""
        kept = [(owner, name, getattr(owner, name)) for group in places.values() for owner, name in group]
        for operation, group in places.items():
            for owner, name in group:
                setattr(owner, name, self._timer(operation, getattr(owner, name)))
        try:
            yield
        finally:
            for owner, name, function in kept:
                setattr(owner, name, function)

    def _timer(self, operation: str, function: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            start = time.process_time()
            self._open.append(0.0)
            try:
                return function(*args, **named)
            finally:
                spent, inside = time.process_time() - start, self._open.pop()
                self.seconds[operation] += spent - inside
                self.calls[operation] += 1
                if self._open:
                    self._open[-1] += spent

        return call


def profiled_block(quick: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of the profile of one block, and notes."""
    d, tokens, heads = (48, 64, 3) if quick else (192, 64, 3)
    layout = Packing(PARAMETERS, tokens)
    buffers.keep_all_freed()  # as each side of an experiment does
    block, x, want = random_block(d, 4 * d, heads, layout)
    session = Session(layout)
    encrypted, profile = session.send(layout.pack(x)), Profile()
    server, kernels = seal.ServerKeys, modular_kernels
    places: dict[str, list[tuple[Any, str]]] = {
        "linear maps": [(matrices, "matrix_product")],
        "products of ciphertexts": [(kernels, "tensor"), (kernels, "outer")],
        "relinearise and rescale": [(server, "relinearise_and_rescale")],
        "rescale alone": [(server, "rescale")],
        "rotate": [(server, "rotations")],
        "conjugate": [(server, "conjugate")],
        "join and separate pairs": [(Ring, "pair"), (Ring, "unpair")],
        "refresh: encryptions of zero": [(server, "zeros")],
        "refresh: masks": [(Mask, "coefficients")],
        "refresh: messages": [(Channel, "pack"), (Channel, "unpack")],
        "refresh: rest": [(RemoteRefresh, "__call__")],
        "the client": [(session.refresh, "_exchange")],
        "sums, copies, constants": [(block.__class__, "__call__")],
    }
    block_s, before = 0.0, 0
    for turn in range(2):  # the first turn, of few features, compiles
        if not turn:
            small, few, _ = random_block(12, 12, heads, layout)
            small(session.send(layout.pack(few)))
            continue
        before = session.refresh.bytes_up + session.refresh.bytes_down
        start = time.process_time()
        with profile.watch(places):
            out = block(encrypted)
        block_s = time.process_time() - start
    slots = layout.unpack(session.client.decrypt(out.residues, out.scale), layout.samples)
    rates = product_rates(d)
    owner = block_s - profile.seconds["the client"]
    table = [
        {
            f"d = {d}, {tokens} tokens": name,
            "calls": profile.calls[name],
            "CPU s": profile.seconds[name],
            "% of the owner": None if name == "the client" else 100 * profile.seconds[name] / owner,
            "bound, CPU s": rates.get(name),
        }
        for name in places
    ]
    table.append(
        {
            f"d = {d}, {tokens} tokens": "owner, all",
            "calls": None,
            "CPU s": owner,
            "% of the owner": 100.0,
            "bound, CPU s": sum(rates.values()),
        }
    )
    one = np.ones(1)
    layer = Layer(dict(block.weights), heads, block.norms, EXP, INVERSE, block.inverse_scales, GELU)
    model = Model(np.zeros((d, 1)), np.zeros(d), np.zeros((tokens, d)), (layer,), one, 16 * one)
    expected = plan(model, [layout.samples], "class", parameters=PARAMETERS).seconds_per_block
    client = profile.seconds["the client"]
    megabytes = (session.refresh.bytes_up + session.refresh.bytes_down - before) / 1e6
    notes = [
        "The bound: products of the linear maps, as float64 matrices of 192 x 192 by 192 x 2048, and of ciphertexts "
        "with ciphertexts, as residues in the first cache.",
        f"The plan expects {expected[0]:.3g} s of the owner (measured {owner:.3g}) and {expected[1]:.3g} of the client "
        f"(measured {client:.3g}).",
        f"{megabytes:.0f} MB of refreshes for {layout.samples} samples. Largest error "
        f"{np.abs(slots - want).max():.2g}, rms {np.sqrt(((slots - want) ** 2).mean()):.2g}; standard deviation of the "
        f"output {want.std():.2f}.",
    ]
    return table, notes


def least_seconds(work: Callable[[], object]) -> float:
    """CPU seconds of the fastest of ten calls."""
    found = []
    for _ in range(10):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return min(found)


def product_rates(d: int, tokens: int = 64) -> dict[str, float]:
    """CPU seconds of the products of a block of width d alone, at the rate of one small product of each kind."""
    rng, degree = np.random.default_rng(0), PARAMETERS.degree
    a, b = rng.normal(size=(192, 192)), rng.normal(size=(192, 2048))
    out = np.empty((192, 2048))
    matrix = least_seconds(lambda: np.matmul(a, b, out=out)) / (192 * 192 * 2048)
    pieces = 2 * (2 * 3 + 1)  # two polynomials; two pieces of each prime but the narrow one
    few = rng.integers(0, 1 << 20, (16, 2, 1, 64))
    ring, result = seal.ring_of(PARAMETERS), np.empty((3, 1, 64), np.int64)

    def multiply() -> None:
        for _ in range(100):
            modular_kernels.tensor(few, few, result, ring.primes)

    residue = least_seconds(multiply) / (100 * 16 * 4 * 64)
    terms = 2 * d * tokens + 4 * d + 4 * d + 3 * tokens * 5
    return {
        "linear maps": 12 * d * d * pieces * degree * matrix,
        "products of ciphertexts": terms * 4 * PARAMETERS.limbs * degree * residue,
    }


def main() -> None:
    options = common.arguments(__doc__, profile={"action": "store_true", "help": "profile one block by operation"})
    quick = options.quick
    if options.profile:
        with threadpool_limits(1):
            rows, words = profiled_block(quick)
        common.emit("Encrypted inference", [{"title": "Where a block's time goes", "rows": rows}], [], words)
        return
    with threadpool_limits(1):
        first, goals = linear_layers(quick)
        second, more, notes = whole_block(quick)
        third, parallel, note = several_processes(quick)
    tables = [
        {"title": "Linear layers, four primes", "rows": first},
        {"title": "A block; CPU seconds", "rows": second},
        {"title": "Several processes; seconds of owner and holder, start and keys", "rows": third},
    ]
    common.emit("Encrypted inference", tables, [*goals, *more, *parallel], [*notes, *note])


if __name__ == "__main__":
    main()
