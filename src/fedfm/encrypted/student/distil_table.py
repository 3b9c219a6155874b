"""The table that `fedfm distil` prints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fedfm.encrypted.student.folding import MOST_OUTSIDE, remedy


def table(result: Mapping[str, Any]) -> str:
    """Compare teacher and student on held-out rows, and list each block's polynomials with their measured intervals."""
    again = "measured" in result
    lines = [
        *(_remeasurement_lines(result) if again else _distillation_lines(result)),
        "",
        f"{'block':<6}{'depth':>5}{'outside':>9}  {'scores':<16}{'row sums':<20}{'variances':<38}{'before GELU':<16}",
    ]
    for i, block in enumerate(result["blocks"], 1):
        norms = "  ".join(f"{_ends(n)} k={n['steps']}" for n in block["norms"])
        sums = f"{_ends(block['inverse'])} d={block['inverse']['steps']}"
        lines.append(
            f"{i:<6}{block['depth']:>5}{block['outside']:>9.2%}  {_ends(block['exp']):<16}{sums:<20}{norms:<38}"
            f"{_ends(block['gelu']):<16}"
        )
    if not again and not math.isfinite(result["distance"]):
        lines += [
            "",
            "for some held-out rows the student's activations overflow, since arguments are far outside their "
            f"intervals; {remedy(result['blocks'])}",
        ]
    if not result["outside"] <= MOST_OUTSIDE:
        lines += ["", f"more than {MOST_OUTSIDE:.1%} of arguments are outside: encrypted runs refuse this student; "]
        lines[-1] += "measure it again with more rows of this kind" if again else remedy(result["blocks"])
    return "\n".join(lines)


def _distillation_lines(result: Mapping[str, Any]) -> list[str]:
    return [
        f"{result['folder']}: {result['epochs']} epochs, {result['parameters']} parameters, {result['seconds']:.0f} s",
        "",
        f"{'held-out rows':<34}{'teacher':>10}{'student':>10}",
        f"{'accuracy':<34}{result['teacher_accuracy']:>10.4f}{result['accuracy']:>10.4f}",
        f"{'same class as the teacher':<34}{'':>10}{result['agreement']:>10.4f}",
        f"{'squared distance of the features':<34}{'':>10}{result['distance']:>10.4f}",
        f"{'arguments outside their interval':<34}{'':>10}{result['outside']:>10.2%}",
    ]


def _remeasurement_lines(result: Mapping[str, Any]) -> list[str]:
    accuracy = f"{'accuracy':<34}{result['accuracy_before'] or 0:>10.4f}{result['accuracy'] or 0:>10.4f}"
    return [
        f"{result['folder']}: measured again on {result['measured']} rows, {result['seconds']:.0f} s",
        "",
        f"{str(result['judged']) + ' held-out rows':<34}{'before':>10}{'now':>10}",
        *([] if result["accuracy"] is None else [accuracy]),
        f"{'rows whose features overflow':<34}{result['without_numbers_before']:>10}{result['without_numbers']:>10}",
        f"{'arguments outside their interval':<34}{result['outside_before']:>10.2%}{result['outside']:>10.2%}",
    ]


def _ends(entry: Mapping[str, Any]) -> str:
    low, high = entry["interval"]
    return f"{low:.3g}..{high:.3g}"
