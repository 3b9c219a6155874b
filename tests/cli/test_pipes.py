"""A run directory from elsewhere may contain pipes and devices in place of files: no command waits for them."""

import os
import shutil
import signal

import pytest

from fedfm.api import execute
from fedfm.cli import main
from small import experiment

PLACES = ("manifest.json", "metrics.jsonl", "audit.json", "adapter/model.safetensors")
COMMANDS = {
    "report": ["report", "RUN"],
    "compare": ["compare", "RUN", "RUN"],
    "audit": ["audit", "RUN"],
    "predict": ["predict", "RUN", "rows.npz"],
    "export": ["export", "RUN", "--to", "peft", "--out", "out"],
    "resume": ["resume", "RUN"],
    "sign": ["sign", "RUN", "--key", "key.pem"],
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    execute.run(experiment(folder, method={"name": "fedavg", "rounds": 1}), folder / "run")
    return folder / "run"


@pytest.fixture(autouse=True)
def _limit():
    def late(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_pipe_is_refused_by_name(command, finished, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for number, place in enumerate(PLACES):
        run = shutil.copytree(finished, tmp_path / str(number))
        (run / place).unlink(missing_ok=True)
        os.mkfifo(run / place)
        assert main([word.replace("RUN", str(run)) for word in COMMANDS[command]]) == 2, place
        assert f"{run / place} is a pipe or a device" in capsys.readouterr().err


def test_a_link_to_a_device_is_one_and_a_link_to_a_file_is_not(finished, tmp_path, capsys):
    run = shutil.copytree(finished, tmp_path / "run")
    (run / "metrics.jsonl").rename(tmp_path / "elsewhere")
    (run / "metrics.jsonl").symlink_to(tmp_path / "elsewhere")
    assert main(["compare", str(run), str(finished), "--out", str(tmp_path / "page.html")]) == 0
    (run / "messages.jsonl").unlink()
    (run / "messages.jsonl").symlink_to("/dev/zero")  # it has no end, and one reader would fill the memory
    assert main(["report", str(run)]) == 2
    assert "messages.jsonl is a pipe or a device" in capsys.readouterr().err


def test_a_signature_and_a_list_of_runs_that_are_pipes(finished, tmp_path, capsys):
    run = shutil.copytree(finished, tmp_path / "runs" / "run")
    os.mkfifo(tmp_path / "runs" / "study.json")
    os.mkfifo(run / "signature.json")
    assert main(["verify", str(run)]) == 2
    assert "signature.json is a pipe or a device" in capsys.readouterr().err
    (run / "signature.json").unlink()
    assert main(["compare", str(tmp_path / "runs"), "--out", str(tmp_path / "page.html")]) == 0


def test_deeply_nested_json_counts_as_damage(finished, tmp_path, capsys):
    """JSON of some hundred levels can be read, and then not be followed by recursion."""
    for levels in (70, 300, 5_000):
        run = shutil.copytree(finished, tmp_path / str(levels))
        text = (run / "manifest.json").read_text()
        (run / "manifest.json").write_text(
            text.replace('"accuracy": ', f'"x": {"[" * levels}{"]" * levels}, "accuracy": ')
        )
        for command in ("report", "audit", "sign"):
            words = [word.replace("RUN", str(run)) for word in COMMANDS[command]]
            assert main(words) == 2
            assert "manifest.json" in (told := capsys.readouterr().err)
            assert "nested" in told
