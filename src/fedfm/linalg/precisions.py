"""Names of the forms in which trained values cross, ``run.transport``; :mod:`fedfm.linalg.quantised` computes them."""

from __future__ import annotations

EXACT = "float32"
BFLOAT16, INT8 = "bfloat16", "int8"
CODED = (BFLOAT16, INT8)
