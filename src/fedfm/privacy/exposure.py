"""The words that say which data of a silo a request exposes; see :mod:`fedfm.privacy.policy`."""

from __future__ import annotations

HELLO = "query.hello"  # the handshake, which asks for the silo's name: answered if anything is allowed
WORDS = ("mean", "reply", "scores", "reveal")
EXPOSES = {"train": "mean", "aggregate": "mean", "query": "reply", "scores": "scores", "reveal": "reveal"}  # by kind
