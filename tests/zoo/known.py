"""Writes known_failures.json from results.json, after `make test-models` has shown what fails, and what no longer does.

python tests/zoo/known.py
"""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    """Write the first failure of each trial that fails."""
    families = json.loads((HERE / "results.json").read_text(encoding="utf-8"))["families"]
    known: dict[str, dict[str, str]] = {}
    for family, about in families.items():
        for trial, outcome in about["trials"].items():
            if fails := [f"{step} {what}" for step, what in outcome.items() if what.startswith("fails")]:
                known.setdefault(family, {})[trial] = fails[0]
    text = json.dumps(known, indent=1, ensure_ascii=False) + "\n"
    (HERE / "known_failures.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
