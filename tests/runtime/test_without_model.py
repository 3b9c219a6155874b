"""A silo whose clients have no model: it has its rows and its notices, and says so where a model is asked for."""

from pathlib import Path

import pytest

from fedfm.config.experiment import Experiment
from fedfm.linalg.precisions import EXACT
from fedfm.runtime.client import Silos
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.population import populate
from fedfm.runtime.run_manifest import of_silo
from small import experiment


@pytest.fixture
def without(tmp_path: Path) -> tuple[Experiment, Partitioned]:
    found = Experiment.from_dict(experiment(tmp_path))
    return found, Partitioned(populate(found).federated, None)


def test_a_silo_without_a_model_has_rows_and_notices(without, tmp_path):
    found, population = without
    assert of_silo(found.method, population) == of_silo(found.method, populate(found))
    silos = Silos(found.method, found.aggregation, population, memory=tmp_path / "memory", transport=EXACT)
    assert (silos.width, silos.least) == (1, 1)
    silos.prepare([])
    assert len(population.data(population.clients[0]).train)
    assert not population.trains_on_blocks


def test_a_model_that_is_not_there_is_named(without, tmp_path):
    found, population = without
    assert population.model_or_none is population.client_model is None
    with pytest.raises(RuntimeError, match="clients of this method have no model"):
        _ = population.model
    with pytest.raises(RuntimeError, match="clients of this method have no model"):
        Silos(found.method, found.aggregation, population, memory=tmp_path / "memory", transport="int8")
