"""BlindFed with pictures that leave the intervals of its polynomials: they are left out, and not their client."""

import numpy as np
import pytest
import torch

import ciphertext_student
import fedfm
from fedfm.core.client import Client
from fedfm.core.rows import Rows
from fedfm.encrypted.protocol.out_of_range import exclude_rows
from fedfm.errors import ClientFault
from fedfm.models.adapters.side_adapter import STATES
from fedfm.training.scheduler import train_client
from small import pictures

LOCAL = {"learning_rate": 0.2, "epochs": 5, "batch_size": 16}


def tables(folder, noisy, **method):
    """Pictures of three clients, those named replaced by noise of black and white."""
    path = pictures(folder, 60)
    rows = dict(np.load(path))
    rng = np.random.default_rng(0)
    for i in noisy:
        rows["x"][i] = rng.integers(0, 2, rows["x"][i].shape) * 255
    np.savez(path, **rows)
    keys = {"name": "blindfed", "foundation": str(ciphertext_student.folder(folder)), "rounds": 3, "released": "grid"}
    return {
        "data": {"path": str(path), "partition": {"name": "iid", "clients": 3}},
        "method": keys | {"encryption": "clear", "local": LOCAL} | method,
        "run": {"seed": 0, "workers": 1},
    }, rows["split"]


@pytest.mark.parametrize("protocol", ["masked", "permuted"])
def test_a_client_with_one_such_row_takes_part_with_the_others(tmp_path, protocol):
    asked, split = tables(tmp_path, [3], protocol=protocol)
    assert split[3] == "train"
    result = fedfm.run(asked, tmp_path / "run")
    assert result["excluded"] == []
    assert result["accuracy"] > 0.9
    found = [text for text in fedfm.load_run(tmp_path / "run").manifest["notices"] if "left the intervals" in text]
    assert [text.partition(" rows of ")[0] for text in found] == (["1 of 20"] if protocol == "masked" else [])


def test_such_a_test_row_has_no_answer_and_counts_as_wrong(tmp_path):
    """All other test rows are right; the run's accuracy is their share, at the server and at their client."""
    asked, split = tables(tmp_path, [0])
    assert split[0] == "test"
    result = fedfm.run(asked, tmp_path / "run")
    assert result["excluded"] == []
    clean, _ = tables(tmp_path, [])
    whole = fedfm.run(clean, tmp_path / "clean")
    assert whole["params_sha256"] == result["params_sha256"]
    line = fedfm.load_run(tmp_path / "run").metrics()[-1]
    assert line["loss"] is not None
    n = int((split == "test").sum())
    assert whole["accuracy"] == 1.0
    assert result["accuracy"] == pytest.approx((n - 1) / n)
    assert sum(a < 1 for a in line["client_accuracy"].values()) == 1
    assert np.sum(line["confusion"]) == n - 1


def test_a_client_without_another_row_takes_no_part():
    states = torch.ones(3, 2, 1, 4)
    states[1:, 1] = 0  # lost at the second block
    notes = []
    client = Client("c", None, None, {}, 0, log=notes.append, trainer=train_client)
    parts = {part: Rows({STATES: states}, labels=torch.arange(3)) for part in ("train", "val", "test")}
    found, whole = exclude_rows(client, parts)
    assert {part: mask.tolist() for part, mask in whole.items()} == {part: [True, False, False] for part in parts}
    assert {part: rows.labels.tolist() for part, rows in found.items()} == {"train": [0], "val": [0], "test": [0, 1, 2]}
    assert found["test"].tensors[STATES].sum((1, 2, 3)).tolist() == [8, 0, 0]
    assert "2 of 3 train rows" in notes[0]
    with pytest.raises(ClientFault, match="all training rows left the intervals"):
        exclude_rows(client, {part: rows.take([1, 2]) for part, rows in parts.items()})


@pytest.mark.proof
def test_on_ciphertexts_a_row_far_outside_takes_its_batch_with_it(tmp_path):
    asked, _ = tables(tmp_path, [3], encryption="ckks")
    result = fedfm.run(asked, tmp_path / "run")
    assert {e["client"] for e in result["excluded"]} == {"client-00"}
    assert "a row far outside the model's intervals made its batch overflow" in result["excluded"][0]["reason"]
    assert result["accuracy"] > 0.9
