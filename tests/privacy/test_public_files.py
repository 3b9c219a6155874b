"""The public files of a run with an epsilon are functions of its releases: what no release depends on is not in them.

A row enters a release of unit vectors by its direction. So a row that is 4096 times as long changes no release, and
may change no public file: neither counts, ranges, notices and fingerprints, nor the report or the exported model.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedfm
from fedfm.cli.entry import main

EPSILON = {"unit": "record", "target_epsilon": 8.0, "delta": 1e-5}
APART = re.compile(  # times with their plot, and the fingerprint of the rows under a key in private/
    r"(?s:<section id=.time.*?</section>)|"
    r"\d+(\.\d+)?\s?m?s\b|\d{4}-\d\d-\d\dT[\d:+-]+|(&quot;|\")(seconds|data|crc32)(&quot;|\"): *\S+|data</th><td>\w{64}"
)


def public_files(folder: Path, factor: float, **tables: Any) -> dict[str, str]:
    """The public files of a run on rows of which one is ``factor`` times as long, without :data:`APART`."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(240, 5)), np.arange(240) % 3
    x = (x + y[:, None]).astype(np.float32)
    x[3] *= factor
    split, site = np.where(np.arange(240) < 180, "train", "test"), np.array([f"c{i % 4}" for i in range(240)])
    np.savez(folder / "rows.npz", x=x, y=y, split=split, site=site, classes=np.array(["a", "b", "c"]))
    here = os.getcwd()
    os.chdir(folder)  # the manifest has the path
    try:
        data = {"path": "rows.npz", "split": "split", "partition": {"name": "by_column", "column": "site"}}
        fedfm.run({"data": data, "model": {"name": "features"}, **tables}, "run", progress=fedfm.Progress())
        assert main(["report", "run"]) == 0
        if tables["method"]["name"] != "survey":
            assert main(["export", "run", "--to", "torch", "--out", "exported"]) == 0
    finally:
        os.chdir(here)
    found = {}
    for path in sorted(folder.glob("*/**/*")):
        if path.is_file() and "private" not in path.parts and path.suffix != ".safetensors":
            lines = APART.sub("", path.read_text(encoding="utf-8")).splitlines()
            found[str(path.relative_to(folder))] = "\n".join(sorted(lines))  # clients may answer in any order
    weights = json.loads((folder / "run/manifest.json").read_text())["result"]["params_sha256"]
    return found | {"weights": weights}


@pytest.mark.parametrize(
    "method",
    [
        {"name": "fedpft", "components": 1},
        {"name": "fedpft", "components": 1, "pooled": True},
        {"name": "analytic"},
        {"name": "survey", "norm_bins": [1e9]},
    ],
    ids=["fedpft", "pooled", "analytic", "survey"],
)
def test_no_public_file_depends_on_what_no_release_depends_on(tmp_path, known_secrets, method):
    one, other = (public_files(tmp_path / f"x{f}", float(f), method=method, privacy=EPSILON) for f in (1, 4096))
    assert {"run/manifest.json", "run/messages.jsonl", "run/metrics.jsonl", "run/report.html"} <= one.keys()
    assert one.keys() == other.keys()
    for name, text in one.items():
        assert text == other[name], name


def test_the_same_rows_change_the_public_files_of_a_run_without_epsilon(tmp_path, known_secrets):
    one, other = (public_files(tmp_path / f"x{f}", float(f), method={"name": "analytic"}) for f in (1, 4096))
    assert one["run/manifest.json"] != other["run/manifest.json"]  # ranges of values, weights
    assert one["weights"] != other["weights"]
