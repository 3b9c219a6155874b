"""The values of ``run.transport``: the forms in which messages carry trained parameters.

:mod:`fedfm.linalg.quantised` computes these forms.
"""

from __future__ import annotations

EXACT = "float32"
BFLOAT16, INT8 = "bfloat16", "int8"
CODED = (BFLOAT16, INT8)
