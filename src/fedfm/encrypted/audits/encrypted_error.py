"""Measure the error of encrypted computation, for each block and the logits; check that bad messages are refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from fedfm.audits.audit import Audit
from fedfm.audits.finding import COUNT, Finding, VerdictRule
from fedfm.audits.replay import Replay
from fedfm.encrypted.audits.block_states import client_input, largest_client, side_model
from fedfm.encrypted.blindfed import BlindFed
from fedfm.encrypted.ckks.refresh import DistanceLedger
from fedfm.encrypted.student.conversion import fold
from fedfm.errors import ClientFault
from fedfm.models.adapters.side_adapter import STATES, SideModel
from fedfm.runtime.run_directory import Run

ERROR = "How far are disclosed activations under encryption from the same activations in the clear?"
LOGITS = "How far are the logits of encrypted rows from the logits of the same rows in the clear, end to end?"
REFUSED = "Are encrypted rows refused if they are damaged, altered, repeated, or made for another session or key?"
ROWS = 16  # number of rows in the batch; the time of a batch does not depend on it
MOST = 1e-2  # largest error that a run may have
ALL = VerdictRule(("estimate < bound",), ("estimate >= bound",))


class EncryptedError(Audit):
    """Finds the largest error of each block, and the fraction of bad messages that are refused."""

    methods: ClassVar[tuple[str, ...]] = ("blindfed",)
    replays: ClassVar[bool] = False
    by_default: ClassVar[bool] = False  # it runs a batch through the complete model
    takes: ClassVar[float] = 120.0

    def unfit(self, run: Run) -> str | None:
        method = run.experiment.method_as(BlindFed)
        return 'encryption = "clear" encrypts nothing' if method.encryption == "clear" else None

    def findings(self, replay: Replay, notice: Callable[[str], None], **options: Any) -> list[Finding]:
        from fedfm.encrypted.protocol import masked, permuted  # these modules need TenSEAL

        population, method = replay.population, replay.run.experiment.method_as(BlindFed)
        in_one_place = permuted.in_one_place if method.protocol == "permuted" else masked.in_one_place
        model = side_model(population)
        index = population.federated.clients[largest_client(population)].train[:ROWS]
        rows = model.prepare(population.federated.table, index).compute()
        notice("one batch under encryption")
        seen = in_one_place(model, rows)
        encrypted, clear = seen.tensors[STATES], model.states(rows)
        model.load(method.params_for(replay.run.state(method.state_type), largest_client(population)))
        said = model.predict(seen), model.predict(model.encode(rows))
        return [_error(encrypted, clear), _logits(*said), _refusals(model, client_input(model, rows))]


def _error(encrypted: Tensor, clear: Tensor) -> Finding:
    off = (encrypted - clear).abs()
    worst, rms = float(off.max()), float(off.square().mean().sqrt())
    detail = {"largest_by_block": [float(f"{float(x):.2e}") for x in off.amax((0, 2, 3))], "rms": float(f"{rms:.2e}")}
    says = f"The largest of {off.numel()} errors is {worst:.1e}, their rms {rms:.1e}; the states have an rms near 1."
    return Finding("encryption.error", ERROR, worst, None, None, MOST, COUNT, says, False, detail)


def _logits(encrypted: Tensor, clear: Tensor) -> Finding:
    worst = float((encrypted - clear).abs().max())
    same = float((encrypted.argmax(1) == clear.argmax(1)).double().mean())
    says = (
        f"The logits of the trained adapters differ by at most {worst:.1e}; the logits in the clear have a standard "
        f"deviation of {float(clear.std()):.2g}. {same:.0%} of the rows get the same class."
    )
    detail = {"same_class": round(same, 4)}
    return Finding("encryption.logits", LOGITS, worst, None, None, MOST, COUNT, says, False, detail)


def _refusals(model: SideModel, x: np.ndarray) -> Finding:
    from fedfm.encrypted.inference.model_owner import KeyHolder, ModelOwner

    matrices = fold(model.frozen_parts[0].module)
    holder, other = (KeyHolder.new(len(matrices.positions)) for _ in range(2))
    public, session, key = holder.public(), os.urandom(16), os.urandom(32)
    holder.begin(session, key)
    good = holder.rows(x)
    other.begin(session, os.urandom(32))
    holder.begin(os.urandom(16), key)
    cases = {**dict(_damage(good)), "another key": other.rows(x), "another session": holder.rows(x)}

    def refuses(message: bytes) -> bool:
        def never(_: bytes) -> bytes:
            raise AssertionError("a refresh was requested")

        owner = ModelOwner(matrices, "class", public, session, key, DistanceLedger())
        try:
            owner.run(message, never, lambda block, states: None)
        except ClientFault:
            return True
        return False

    missed = [name for name, message in cases.items() if not refuses(message)]
    share = 1 - len(missed) / len(cases)
    says = f"{len(cases) - len(missed)} of {len(cases)} are refused before anything is computed: {', '.join(cases)}."
    says += f" Accepted: {', '.join(missed)}." if missed else ""
    return Finding("encryption.refusals", REFUSED, share, None, None, 1.0, ALL, says, bool(missed))


def _damage(good: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield damaged messages, each with the name of its damage."""
    middle = len(good) // 2
    yield "cut off", good[:-1]
    yield "a byte too long", good + b"\0"
    yield "nothing", b""
    for place, name in ((4, "another version"), (middle, "an altered ciphertext"), (len(good) - 1, "another tag")):
        yield name, good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :]
    size = np.gcd(middle, 4096) or 1
    yield (
        "two ciphertexts exchanged",
        good[:200] + good[200 + size : 200 + 2 * size] + good[200 : 200 + size] + good[200 + 2 * size :],
    )
