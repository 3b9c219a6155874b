"""Time each kind of operation of an encrypted run on this machine, and multiply by how often a batch needs it."""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fedfm.encrypted.ckks import seal
from fedfm.encrypted.ckks.ciphertexts import Ciphertexts, products
from fedfm.encrypted.ckks.inner_products import outer
from fedfm.encrypted.ckks.matrices import matrix_product
from fedfm.encrypted.ckks.refresh import Masking
from fedfm.encrypted.ckks.remote_refresh import answer_refresh, encrypt_message
from fedfm.encrypted.ckks.slot_constants import encode_slots, weighted_sum
from fedfm.encrypted.ckks.transformer_block import Packing
from fedfm.encrypted.ckks.wire import Channel, Sender
from fedfm.encrypted.inference import messages
from fedfm.linalg.kernels import buffers

_AGAIN = 4  # number of repetitions
_FEW = 16  # number of ciphertexts in a timed operation
_TERMS = 8  # number of terms in timed sums of products
_STEPS = 8  # number of rotations of one ciphertext that are timed together
_COLUMNS = 2048  # number of columns of a timed matrix product, as many as it computes at a time
_WIDE = 32  # a refresh of more ciphertexts is timed once only
_SPARE = 4  # largest number of calls that are not counted, because they get new memory
_NEW = 1 << 20  # bytes of new memory from which a call is not counted
_SIDES: tuple[Sender, Sender] = ("client", "server")


@dataclass
class Work:
    """What one batch needs, over all blocks.

    Attributes:
        operations: count for each (name, number of primes), see :class:`~.operation_count.Count`.
        refreshes: number of refreshes for each number of ciphertexts in one.
        maps: number of linear maps for each (rows, columns, number of primes).
        fresh: number of ciphertexts that the client encrypts, apart from refreshes: rows, and states in the "permuted"
            protocol.
        disclosed: number of ciphertexts with one prime that the owner sends.
    """

    operations: Counter[tuple[str, int]] = field(default_factory=Counter)
    refreshes: Counter[int] = field(default_factory=Counter)
    maps: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    fresh: int = 0
    disclosed: int = 0


@dataclass(frozen=True)
class SideSeconds:
    """CPU seconds of one batch, by operation.

    Attributes:
        owner: the owner's; names of operations are those of :class:`Work`.
        client: the client's.
        key_bytes: size in bytes of the client's evaluation keys.
    """

    owner: dict[str, float]
    client: dict[str, float]
    key_bytes: int


def operation_seconds(work: Work, layout: Packing, bound: float, rotations: Iterable[int]) -> SideSeconds:
    """Time each operation of ``work`` on a core of this machine.

    Both sides of a run keep freed memory for their next arrays, so this process does the same from here on.

    Args:
        bound: largest magnitude of a slot, for the masks.
        rotations: rotation steps for which the client has keys.
    """
    buffers.keep_all_freed()
    parameters = layout.parameters
    client = seal.ClientKeys(parameters)
    public = client.public(rotations)
    server = seal.ServerKeys(parameters, public, floor=messages.floor_of(parameters))
    x = Ciphertexts(client.encrypt(np.ones((_FEW, parameters.slots))).view(np.uint64), parameters.scale, server)
    timed = _Timed(x, sorted(layout.rotations)[:_STEPS])
    owner: defaultdict[str, float] = defaultdict(float)
    for (name, limbs), count in work.operations.items():
        owner[name] += count * timed.seconds(name, limbs)
    for (rows, columns, limbs), count in work.maps.items():
        owner["linear maps"] += count * timed.matrix(rows, columns, limbs)
    theirs, ours = _refreshes(client, x, bound, work.refreshes)
    encrypt, receive, send, decrypt = _messages(client, server)
    owner["refreshes"], owner["messages"] = ours, work.fresh * receive + work.disclosed * send
    return SideSeconds(
        dict(owner), {"refreshes": theirs, "messages": work.fresh * encrypt + work.disclosed * decrypt}, len(public)
    )


class _Timed:
    """Times operations on the ciphertexts ``x``, which have all primes; ``steps`` are rotations."""

    def __init__(self, x: Ciphertexts, steps: list[int]) -> None:
        self._x, self._steps, self._rotated = x, steps, dict[int, tuple[float, float]]()

    def seconds(self, name: str, limbs: int) -> float:
        """Return CPU seconds of one operation of this name on ciphertexts with ``limbs`` primes."""
        x = self._x.at(limbs)
        server, ring, count = x.evaluator, x.evaluator.ring, len(x)
        one, zero = np.ones((), np.int64), np.zeros((), np.int64)
        if name in ("decompose", "rotate"):
            if limbs not in self._rotated:
                self._rotated[limbs] = self._rotations(x)
            return self._rotated[limbs][name == "rotate"]
        if name == "relinearise":
            wide = Ciphertexts(np.repeat(x.limbs, 2, axis=1)[:, :3].copy(), x.scale, server)
            return _measure_seconds(lambda: server.relinearise_and_rescale(wide), count)
        plains = np.ones((count, limbs, ring.degree), np.int64)
        work: dict[str, tuple[Callable[[], object], int]] = {
            "rescale": (lambda: server.rescale(x), count),
            "product": (lambda: products(x, x), count),
            "term": (lambda: outer(x, x, _TERMS), count**2 // _TERMS),
            "weigh": (lambda: weighted_sum(x, plains, 1.0), count),
            "encode": (lambda: encode_slots(np.ones((count, ring.degree // 2)), limbs, x.scale, ring), count),
            "add": (lambda: ring.add(x.residues, x.residues), 2 * count),
            "affine": (lambda: ring.affine(x.residues, one, zero), 2 * count),
        }
        return _measure_seconds(*work[name])

    def _rotations(self, x: Ciphertexts) -> tuple[float, float]:
        """Return seconds of a ciphertext's digits, and of one rotation."""
        first = _measure_seconds(lambda: x.evaluator.rotations(x, self._steps[:1]), len(x))
        if len(self._steps) == 1:
            return first / 2, first / 2
        more = _measure_seconds(lambda: x.evaluator.rotations(x, self._steps), len(x))
        one = (more - first) / (len(self._steps) - 1)
        return max(first - one, 0.0), one

    def matrix(self, rows: int, columns: int, limbs: int) -> float:
        """Return CPU seconds of a matrix (rows, columns) times ciphertexts with ``limbs`` primes."""
        ring = self._x.evaluator.ring
        width = min(_COLUMNS, ring.degree)
        weight = np.rint(np.random.default_rng(0).normal(size=(rows, columns)) * ring.primes[limbs - 1] / columns**0.5)
        part = np.ones((columns, 1, limbs, width), np.int64)
        return _measure_seconds(lambda: matrix_product(weight, part, ring), 1) * 2 * ring.degree / width


def _refreshes(client: seal.ClientKeys, x: Ciphertexts, bound: float, sizes: Counter[int]) -> tuple[float, float]:
    """Return client's and owner's seconds for ``sizes``: size of a refresh -> number of such refreshes.

    In a message of hundreds of ciphertexts, each takes up to twice as long as in a small message, because a large
    message does not fit into the cache.
    """
    parameters, masking, floor = client.parameters, Masking(bound), messages.floor_of(client.parameters)
    theirs = ours = 0.0
    for size, often in sizes.items():
        here, there = (Channel(parameters, bytes(32), bytes(16), side) for side in _SIDES)
        many = Ciphertexts(np.repeat(x.limbs, -(-size // len(x)), axis=0)[:size], x.scale, x.evaluator).at(floor)
        hidden, _ = masking.hide(many)
        message = there.pack(hidden.residues, x.scale)

        def answer(here: Channel = here, message: bytes = message) -> bytes:
            here.received = here.sent = 0
            return answer_refresh(client, here, message, floor)

        reply = answer()

        def ask(there: Channel = there, many: Ciphertexts = many, reply: bytes = reply) -> None:
            there.received = there.sent = 0
            covered, mask = masking.hide(many)
            there.pack(covered.residues, x.scale)
            fresh, scale = there.unpack(reply, limbs=parameters.limbs)
            masking.reveal(Ciphertexts(fresh.view(np.uint64), scale, x.evaluator), mask)

        turns = 1 if size > _WIDE else _AGAIN
        theirs += often * _measure_seconds(answer, 1, turns)
        ours += often * _measure_seconds(ask, 1, turns)
    return theirs, ours


def _messages(client: seal.ClientKeys, server: seal.ServerKeys) -> tuple[float, float, float, float]:
    """Return seconds per ciphertext: to encrypt, to receive (all primes); to send, to decrypt (one prime)."""
    parameters = client.parameters
    here, there = (Channel(parameters, bytes(32), bytes(16), side) for side in _SIDES)

    def encrypt() -> bytes:
        here.sent = 0
        return encrypt_message(client, here, np.ones((_FEW, parameters.slots)))

    fresh = encrypt()

    def receive() -> None:
        there.received = 0
        there.unpack(fresh, limbs=parameters.limbs)

    def send() -> bytes:
        there.sent = 0
        return there.pack(server.zeros(_FEW, 1), parameters.scale)

    sent = send()

    def decrypt() -> None:
        here.received = 0
        client.decrypt(*here.unpack(sent, limbs=1))

    encrypts, receives, sends, decrypts = (_measure_seconds(work, _FEW) for work in (encrypt, receive, send, decrypt))
    return encrypts, receives, sends, decrypts


def _measure_seconds(work: Callable[[], object], count: int, turns: int = _AGAIN) -> float:
    """Return CPU seconds per operation: the mean of several calls. Each call does ``count`` operations.

    Other work on the machine slows a run's operations as well, so the minimum would be too small. A call for which the
    process got more memory does not count, up to ``_SPARE`` of them: the system clears new memory, which for a refresh
    of hundreds of ciphertexts can take half as long as the refresh itself. Freed memory is split between later arrays,
    so even the third call may get more. The blocks of a run use the memory of the first block again.
    """
    work()  # the first call compiles code and makes tables
    spent, counted, spare = 0.0, 0, _SPARE
    while counted < turns:
        before, start = _resident_bytes(), time.process_time()
        work()
        seconds = time.process_time() - start
        if spare and _resident_bytes() - before >= _NEW:
            spare -= 1
        else:
            spent, counted = spent + seconds, counted + 1
    return spent / (turns * count)


def _resident_bytes() -> int:
    """Return the size in bytes of this process's memory; encrypted inference needs /proc in any case."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
