"""What is installed is found without loading anything heavy, plugins included."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedfm.config import registry
from fedfm.errors import InputError
from fedfm.methods.fedavg import FedAvg


def test_listing_and_showing_import_no_torch() -> None:
    code = (
        "import sys\n"
        "from fedfm.config import catalogue\n"
        "from fedfm.config.registry import available\n"
        "catalogue.listing()\n"
        "names = [n for kind in ('methods', 'attacks', 'aggregation') for n in available(kind)]\n"
        "assert len(names) > 20 and all(map(catalogue.method, names))\n"
        "print([m for m in ('torch', 'numpy', 'importlib.metadata') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_entry_points_are_found_by_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "mine" not in registry.available("methods")
    folder = tmp_path / "plugin-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[fedfm.methods]\nmine = fedfm.methods.fedavg:FedAvg\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert registry.available("methods")["mine"] == "fedfm.methods.fedavg:FedAvg"
    with pytest.raises(InputError, match="nobody here has admitted"):
        registry.resolve("methods", "mine")
    monkeypatch.setattr(registry, "_admitted", {})
    registry.admit_named({"method": {"name": "fedbaf", "base": {"name": "mine"}}})
    assert registry.resolve("methods", "mine") is FedAvg
    assert "mine" not in registry.available("attacks")
