"""A resumed run whose clients would have other rows is refused, although the rows themselves are the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import fedfm
import small
from fedfm.errors import InputError
from fedfm.methods.fedavg import FedAvg


def exchange(path: Path) -> None:
    """Exchange two values of the column that names the clients."""
    with np.load(path) as file:
        arrays = dict(file)
    names = arrays["domain"]
    train = arrays["split"] == "train"
    first, other = (np.flatnonzero(train & (names == name))[0] for name in "ns")
    names[[first, other]] = names[[other, first]]
    np.savez(path, **arrays)


def stop(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("private", [False, True])
def test_a_run_on_another_partition_is_not_continued(
    private: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"partition": {"name": "by_column", "column": "domain"}}
    bound = {"unit": "client", "target_epsilon": 50.0, "delta": 1e-3, "clip_norm": 1.0}
    method = {"fraction": 1.0, "rounds": 1}
    tables = small.experiment(tmp_path, data=data, method=method, **({"privacy": bound} if private else {}))
    with monkeypatch.context() as patch:
        patch.setattr(FedAvg, "step", stop)
        with pytest.raises(KeyboardInterrupt):
            fedfm.run(tables, tmp_path / "run")
    assert ("partition" in fedfm.load_run(tmp_path / "run").manifest["fingerprints"]) != private
    before = (tmp_path / "rows.npz").read_bytes()
    exchange(tmp_path / "rows.npz")
    with pytest.raises(InputError, match="the partition changed since this run began"):
        fedfm.resume(tmp_path / "run")
    (tmp_path / "rows.npz").write_bytes(before)
    assert fedfm.resume(tmp_path / "run")["rounds"] == 1
