"""Estimated durations in words."""

from __future__ import annotations


def duration_text(seconds: float) -> str:
    """An estimated duration in words.

    Example:
        >>> duration_text(0.4), duration_text(47.0), duration_text(400.0), duration_text(9000.0)
        ('1 s', '47 s', '7 min', '2.5 h')
    """
    if seconds < 100:
        return f"{max(round(seconds), 1)} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
