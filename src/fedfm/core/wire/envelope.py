"""What stands around a payload in a message of Flower."""

from __future__ import annotations

STYPE = "fedfm.packed"  # how the one array of a message is written
