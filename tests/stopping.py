"""Runs that are stopped: when a round has been judged, after a method's step, or when a mean has been released."""

import pytest

import fedfm
from fedfm.core.federation import Federation


class StopAfter(fedfm.Progress):
    """Stops the run when this round has been judged."""

    def __init__(self, after):
        self._after = after

    def round(self, line):
        if line["round"] == self._after:
            raise KeyboardInterrupt


def stop_in_steps(monkeypatch, cls, rounds):
    """Stop each of these rounds once, after the method's step and before its commit; returns those still to stop."""
    step, left = cls.step, list(rounds)

    def stopping(self, fed, state, t):
        out = step(self, fed, state, t)  # clients have answered and kept what they keep; nothing is committed
        if t in left:
            left.remove(t)
            raise KeyboardInterrupt
        return out

    monkeypatch.setattr(cls, "step", stopping)
    return left


def stop_in_means(monkeypatch, stops):
    """Stop the server after a mean, released and not committed, if ``stops`` says so of (round, cohort, SHA-256) of
    all means so far; returns these.
    """
    mean, seen = Federation.mean, []

    def stopping(self, *args, **kwargs):
        got = mean(self, *args, **kwargs)
        seen.append((self.round, self.cohort, got.sha256()))
        if stops(seen):
            raise KeyboardInterrupt
        return got

    monkeypatch.setattr(Federation, "mean", stopping)
    return seen


def run_stopped(tables, out, **more):
    """Run until it is stopped."""
    with pytest.raises(KeyboardInterrupt):
        fedfm.run(tables, out, **more)
