"""What the blocks of a polynomial student cost in refreshes, without keys and in seconds.

    python blindfed/count_refreshes.py .data/vit_tiny_fhe_224

Wide refreshes are of more than 25 ciphertexts. The table goes to docs/results/blindfed-vit-tiny.md, unless there is
``--no-page``.
"""

from __future__ import annotations

import argparse
from typing import Any

from page import table, write

from fedfm.encrypted.ckks.refresh import PAIRED, distance
from fedfm.encrypted.ckks.ring import Parameters
from fedfm.encrypted.inference import messages
from fedfm.encrypted.inference.operation_count import count_operations
from fedfm.encrypted.student.conversion import fold
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec

WIDE = 25  # ciphertexts, each with two values in a slot


def main() -> None:
    """One row a block."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("student"), parser.add_argument("--no-page", action="store_true")
    a = parser.parse_args()
    spec = ModelSpec(a.student, adaptation=AdaptationSpec("head"), device="cpu")
    folded, parameters = fold(load_model(spec, classes=("a", "b"), kind="image").module), Parameters()
    lines: list[dict[str, Any]] = []
    for number, block in enumerate(folded.blocks):
        sizes = count_operations(block, len(folded.positions), parameters, number == 0).refreshes
        narrow = [n for n in sizes if n <= WIDE]
        lines.append(
            {
                "block": number + 1,
                "wide refreshes": len(sizes) - len(narrow),
                "narrow refreshes": len(narrow),
                "refreshed ciphertexts": sum(sizes),
                "of them in narrow ones": sum(narrow),
            }
        )
    lines.append({"block": "all"} | {name: sum(line[name] for line in lines) for name in list(lines[0])[1:]})
    print(table(lines))
    each = distance(parameters, messages.floor_of(parameters), parameters.scale, folded.bound * PAIRED)
    spent = lines[-1]["refreshed ciphertexts"] * each
    print(f"largest value {folded.bound:.4g}; statistical distance of a batch {spent:.3g}")
    if not a.no_page:
        write("refreshes at 224", table(lines))


if __name__ == "__main__":
    main()
