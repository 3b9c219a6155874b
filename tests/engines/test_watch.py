"""The command that waits for a ServerApp: which locks it recognises, and how it reports awaited silos."""

from types import SimpleNamespace

import pytest

import small
from fedfm.config.experiment import Experiment
from fedfm.engines.flower.deployment import _Watch
from fedfm.engines.flower.node_status import Missing, NodeStatus
from fedfm.engines.flower.server_app import LOCK, is_served, only_server
from fedfm.errors import RunError
from fedfm.runtime.progress import Progress
from fedfm.runtime.run_directory import Run


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


@pytest.mark.parametrize("ours", [True, False])
def test_a_connection_that_breaks_ends_no_run_whoever_started_the_superlink(tmp_path, ours):
    answers, told = [RunError("cannot be reached"), RunError("cannot be reached"), ("running", "")], list[str]()

    def status(run_id):
        answer = answers.pop(0)
        if isinstance(answer, RunError):
            raise answer
        return answer

    run = Run.create(Experiment.from_dict(small.experiment(tmp_path)), tmp_path / "run")
    progress = Progress()
    progress.notice = told.append
    watch = _Watch(run, SimpleNamespace(status=status), SimpleNamespace() if ours else None, lambda: False, progress)
    assert [watch._status(1) for _ in range(3)] == [("", ""), ("", ""), ("running", "")]
    assert told == ["the SuperLink does not answer; the run continues when it does", "the SuperLink answers again"]


@pytest.mark.parametrize("left_out", [False, True])
def test_silos_that_are_left_out_are_not_reported_as_connected(left_out):
    told = list[str]()
    missing = Missing(told.append)
    away = NodeStatus(1, "a", b"", False, None)
    assert missing.tell([away])
    assert missing.any
    assert not missing.tell([], left_out=left_out)
    assert told[1:] == ([] if left_out else ["all awaited silos are connected"])
