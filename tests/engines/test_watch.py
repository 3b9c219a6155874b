"""The command that waits for a ServerApp: whose lock it sees, and what it says of silos that were waited for."""

from types import SimpleNamespace

import pytest

from fedfm.engines.flower.node_status import Missing, NodeStatus
from fedfm.engines.flower.server_app import LOCK, is_served, only_server
from fedfm.errors import RunError


@pytest.fixture
def run(tmp_path):
    (tmp_path / LOCK).parent.mkdir()
    return SimpleNamespace(path=tmp_path, refuse_links=lambda: None)


def test_the_lock_of_a_former_server_app_is_not_that_of_the_run_submitted_again(run):
    assert not is_served(run.path, 1)
    with only_server(run, 1):
        assert is_served(run.path, 1)
        assert not is_served(run.path, 2)
        with pytest.raises(RunError, match="another ServerApp"), only_server(run, 2, patience=0.0):
            pass
        assert is_served(run.path, 1), "who failed to get the lock has not written its name into it"
    assert not is_served(run.path, 1)
    with only_server(run, 2):
        assert is_served(run.path, 2)


@pytest.mark.parametrize("left_out", [False, True])
def test_silos_that_are_left_out_are_not_said_to_be_connected(left_out):
    told = list[str]()
    missing = Missing(told.append)
    away = NodeStatus(1, "a", b"", False, None)
    assert missing.tell([away])
    assert missing.any
    assert not missing.tell([], left_out=left_out)
    assert told[1:] == ([] if left_out else ["all awaited silos are connected"])
