"""Names of the server's own figures: they are complete, and clients cannot set them."""

import json

import pytest

import fedfm
from fedfm.core import update_metrics
from small import experiment

CLIENTS = {
    "loss",
    update_metrics.BEFORE,
    update_metrics.LOSS_BEFORE,
    update_metrics.PASSES,
}  # which a line or the result has from updates

RUNS = {
    "local scores": {"run": {"seed": 1, "workers": 1, "local_scores": True}},
    "validated": {"data": {"val_fraction": 0.2}, "run": {"seed": 1, "workers": 1, "patience": 2}},
    "personal": {"method": {"name": "ditto"}},
    "with a start": {"method": {"name": "fedbip"}},
    "with passes": {"method": {"name": "fedala"}},
}


@pytest.mark.parametrize("name", RUNS)
def test_every_key_of_a_line_and_of_the_result_is_a_name_of_the_servers(tmp_path, name):
    result = fedfm.run(experiment(tmp_path, **RUNS[name]), tmp_path / "run")
    keys = set(result)
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        keys |= set(json.loads(line))
    assert keys - CLIENTS <= update_metrics.SERVERS, sorted(keys - CLIENTS - update_metrics.SERVERS)
    assert not update_metrics.SERVERS & CLIENTS
