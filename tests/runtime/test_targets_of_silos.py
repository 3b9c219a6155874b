"""A silo's targets, put in the order of the federation's classes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedfm.config.experiment import Experiment
from fedfm.data.client_files import reorder_targets
from fedfm.errors import InputError
from fedfm.runtime.own_rows import OwnRows, populate
from fedfm.sites import silo_config

FEDERATION = ("a", "b", "c", "d")


@given(names=st.permutations(FEDERATION), count=st.integers(1, 4), known=st.permutations(FEDERATION))
def test_a_column_is_that_of_its_name_or_absent(names, count, known):
    mine = names[:count]
    values = np.array([[10.0 * FEDERATION.index(name) + row for name in mine] for row in range(3)])
    found = reorder_targets(values, mine, {name: i for i, name in enumerate(known)})
    for i, name in enumerate(known):
        expected = [10.0 * FEDERATION.index(name) + row for row in range(3)] if name in mine else [np.nan] * 3
        np.testing.assert_array_equal(found[:, i], expected)


def of_silo(folder, task, names):
    """The targets that a silo with these names trains on, in a federation of all four."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, (20, len(names)))
    np.savez(folder / "rows.npz", x=rng.normal(size=(20, 3)).astype(np.float32), y=y, classes=np.array(names))
    tables = {
        "data": {"classes": list(FEDERATION), "kind": "features", "width": 3},
        "model": {"name": "features", "task": task},
        "method": {"name": "fedavg"},
        "run": {"engine": "deployment"},
    }
    own = OwnRows("north", str(folder / "rows.npz"), FEDERATION)
    found = populate(own, Experiment.from_dict(tables), FEDERATION)
    rows = found.model.prepare(found.federated.table, range(20))
    return y, rows.batch(range(20))["targets"].numpy()


def test_a_silo_whose_rows_lack_a_label_trains_on_rows_without_it(tmp_path):
    y, targets = of_silo(tmp_path, "multi_label", ("c", "a"))
    np.testing.assert_array_equal(targets[:, [2, 0]], y)
    assert not targets[:, [1, 3]].any()


def test_a_silo_whose_rows_lack_a_number_is_refused(tmp_path):
    with pytest.raises(InputError, match=r'rows\.npz: rows have no target "b", "d", which is in classes'):
        of_silo(tmp_path, "regression", ("c", "a"))


def test_the_check_of_a_silo_says_what_its_rows_lack(tmp_path):
    np.savez(tmp_path / "rows.npz", x=np.eye(6, 3, dtype=np.float32), y=np.eye(6, 2), classes=np.array(["c", "a"]))
    silo = 'name = "north"\ndata = "rows.npz"\nclasses = ["a", "b", "c"]\ntask = "{}"\n'
    (tmp_path / "silo.toml").write_text(silo.format("regression"))
    with pytest.raises(InputError, match=r'rows have no target "b", which is in classes'):
        silo_config.report(tmp_path / "silo.toml")
    (tmp_path / "silo.toml").write_text(silo.format("multi_label"))
    assert silo_config.report(tmp_path / "silo.toml")["classes"] == ["a", "b", "c"]
