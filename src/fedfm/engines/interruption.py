"""The exception that an engine raises when the user stops a run."""

from __future__ import annotations


class Interrupted(KeyboardInterrupt):
    """The user stopped the run. Committed rounds stay, and clients that had started have finished."""
