"""Encrypted inference of several blocks: released states against the clear, and what is refused."""

import numpy as np
import pytest

from fedfm.methods.blindfed.releases import projection_matrix
from fedfm.privacy.crypto import keys
from fedfm.privacy.crypto.refresh import DistanceLedger
from random_twin import random_model

pytest.importorskip("tenseal.sealapi", reason='TenSEAL is absent: pip install "fedfm[encrypted]"')

from fedfm.methods.blindfed.encrypted import Holder, Owner

SAMPLES, TOKENS, D = 5, 4, 4
MODEL, ROWS, STATES = random_model(SAMPLES, TOKENS, D)
HOLDER = Holder.new(TOKENS)
PUBLIC = HOLDER.public()
PROJECTION = projection_matrix(b"owner", 3, D)


class Run:
    """One batch between a holder and an owner, joined by bytes that are kept."""

    def __init__(self, kind="class", *, model=MODEL, holder=HOLDER, ledger=None):
        session, key = keys.entropy(16), keys.entropy(32)
        self.holder, self.ledger = holder, DistanceLedger() if ledger is None else ledger
        projection = PROJECTION if kind == "tokens" else None
        self.owner = Owner(model, kind, PUBLIC, session, key, self.ledger, projection=projection)
        holder.begin(session, key)
        self.asked, self.answers, self.sent, self.states, self.saved = [], [], [], {}, []

    def exchange(self, message):
        self.asked.append(message)
        self.answers.append(self.holder.refresh(message))
        return self.answers[-1]

    def release(self, block, message):
        self.sent.append(message)
        self.states[block] = self.holder.released(message, SAMPLES)

    def go(self, rows=ROWS, start=None):
        message = b"" if start else self.holder.rows(rows)
        self.owner.run(message, self.exchange, self.release, start, lambda c: self.saved.append(c.to_bytes()))
        return self


@pytest.mark.parametrize("kind", ["class", "grid", "tokens"])
def test_released_states_are_those_in_the_clear(kind):
    run = Run(kind).go()
    want = run.owner.kind.clear(STATES)
    for block in range(len(MODEL.blocks)):
        assert run.states[block].dtype == np.float32
        np.testing.assert_allclose(run.states[block], want[:, block], atol=1e-3)
    assert want.std() > 0.1
