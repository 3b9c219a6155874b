"""The first blocks of a polynomial student, for encrypted runs that the whole student makes too long.

    python blindfed/first_blocks.py .data/vit_tiny_fhe_224 .data/vit_tiny_fhe_224.first1 --blocks 1

The blocks, their polynomials and their intervals stay as they are.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file


def main() -> None:
    """Write the shorter student."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("student", type=Path), parser.add_argument("out", type=Path)
    parser.add_argument("--blocks", type=int, required=True)
    a = parser.parse_args()
    a.out.mkdir(parents=True)
    config = json.loads((a.student / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = a.blocks
    table = config["fedfm_polynomials"]
    table["blocks"] = table["blocks"][: a.blocks]
    (a.out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shutil.copy(a.student / "preprocessor_config.json", a.out)
    kept = {}
    for name, tensor in load_file(a.student / "model.safetensors").items():
        parts = name.split(".")
        number = next((int(part) for part in parts if part.isdigit()), 0)
        if number < a.blocks:
            kept[name] = tensor
    save_file(kept, a.out / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    main()
