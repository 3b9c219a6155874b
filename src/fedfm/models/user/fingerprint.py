"""The fingerprint of a user's module."""

from __future__ import annotations

import hashlib

from torch import nn

from fedfm.linalg.params import Layout, to_bytes


def fingerprint_of(module: nn.Module, layout: Layout) -> str:
    """SHA-256 over the frozen parameters, and over the names and shapes of the trainable parameters.

    The values of trainable parameters are left out: a restarted script may initialise them differently, and a resumed
    run has already changed them.
    """
    digest = hashlib.sha256(repr([(n, str(d), s) for n, d, s in layout.entries]).encode())
    for name, p in module.named_parameters():
        if not p.requires_grad:
            digest.update(f"{name} {p.dtype} {tuple(p.shape)}".encode())
            digest.update(to_bytes(p.detach().cpu().contiguous()))
    return digest.hexdigest()
