"""Memories of parties: a round that is asked again finds what it found the first time."""

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from fedfm.runtime.client_memory import DiskMemory


def handle(root, version, writes):
    """One request: what it finds, and then perhaps a mark of its own."""
    memory = DiskMemory(root, "a", version)
    found = list(memory.get("marks", []))
    if writes:
        memory["marks"] = [*found, f"{version[0]}.{version[1]}"]
    memory.commit()
    return found


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=4), min_size=1, max_size=6), st.integers(0, 1), st.data())
def test_whatever_was_written_a_run_that_goes_back_finds_what_it_found(rounds, back, data):
    """Killed after any call of the last round, and resumed after the round before it, or, the newest checkpoint being
    damaged, after the one before that; a call that is repeated within its round reads the same, too.
    """
    last = len(rounds)
    killed = data.draw(st.integers(1, len(rounds[-1])))
    requests = [
        (t, c, w) for t, calls in enumerate(rounds, 1) for c, w in enumerate(calls, 1) if (t, c) <= (last, killed)
    ]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        first = {(t, c): handle(root, (t, c), w) for t, c, w in requests}
        t, c, w = requests[-1]
        assert handle(root, (t, c), w) == first[t, c]
        for t, c, w in requests:
            if t >= last - back:
                assert handle(root, (t, c), w) == first[t, c]


def test_a_memory_does_not_grow_with_the_rounds(tmp_path):
    for t in range(1, 20):
        for c in (1, 2):
            handle(tmp_path, (t, c), True)
    assert len(list((tmp_path / "a").iterdir())) == 4  # both of the last round, and the last of the two before
