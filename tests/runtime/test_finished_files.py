"""Files of a run that were changed, damaged or lost are named, before its result is printed or its model is used."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import fedfm
from fedfm.cli import main
from fedfm.errors import InputError, Lost
from fedfm.runtime import logs
from small import experiment
from stopping import StopAfter, run_stopped

QUIET = fedfm.Progress()
KINDS = {
    "one model": {"method": {"rounds": 2, "fraction": 1.0}},
    "a model for each client": {"method": {"name": "fedamp", "rounds": 2, "fraction": 1.0}},
}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


DAMAGES: dict[str, Callable[[Path], object]] = {"flipped": flip, "cut": cut, "missing": Path.unlink}


@pytest.fixture(scope="module", params=KINDS)
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    fedfm.run(experiment(folder, **KINDS[request.param]), folder / "run", progress=QUIET)
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "copy")
    return tmp_path / "copy/run"


def files_of_model(run: Path) -> list[Path]:
    return [path for path in sorted(run.rglob("*.safetensors")) if "private" not in path.parts]


@pytest.mark.parametrize("how", DAMAGES)
def test_no_lost_model_file_of_a_finished_run_goes_unnoticed(run, how, capsys):
    assert main(["resume", str(run)]) == 0
    result = json.loads((run / "manifest.json").read_text())["result"]
    for path in (file for file in files_of_model(run) if file.parent.name == "adapter" or "000002" in file.name):
        before = path.read_bytes()
        DAMAGES[how](path)
        capsys.readouterr()
        assert main(["resume", str(run)]) == 2
        assert f"{path} is {'missing' if how == 'missing' else 'damaged'}" in capsys.readouterr().err
        assert fedfm.resume(run, accept_loss=True, progress=QUIET)["params_sha256"] == result["params_sha256"]
        path.write_bytes(before)
    assert main(["resume", str(run)]) == 0


def test_a_missing_folder_of_a_model_is_named(run, capsys):
    folders = sorted([*run.glob("adapter"), *run.glob("clients/*/adapter")])
    shutil.rmtree(folders[0])
    assert main(["resume", str(run)]) == 2
    said = capsys.readouterr().err
    assert f"{run / 'adapter'} is missing" in said or "the models of client-00 are missing" in said


def test_a_copy_that_was_made_to_share_the_run_needs_no_model(run):
    shutil.rmtree(run / "private")
    shutil.rmtree(run / "checkpoint")
    assert main(["resume", str(run)]) == 0


def test_a_damaged_model_predicts_nothing(run, capsys):
    for path in run.glob("clients/*/adapter/*.safetensors"):
        flip(path)
        assert main(["predict", str(run), str(run.parent / "rows.npz"), "--client", path.parts[-3]]) == 2
        assert f"{path} is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["metrics.jsonl", "messages.jsonl"])
def test_every_line_of_a_log_that_is_edited_between_stop_and_resume_is_named(name, tmp_path):
    run_stopped(experiment(tmp_path, method={"rounds": 3}), tmp_path / "run", progress=StopAfter(1))
    whole = (tmp_path / "run" / name).read_text().splitlines()
    for i in range(len(whole)):
        run = tmp_path / f"edited-{i}"
        shutil.copytree(tmp_path / "run", run)
        edited = json.loads(whole[i])
        edited["bytes" if name == "messages.jsonl" else "bytes_up"] += 1
        (run / name).write_text("\n".join([*whole[:i], json.dumps(edited), *whole[i + 1 :]]) + "\n")
        fedfm.resume(run, progress=QUIET)
        said = [text for text in fedfm.load_run(run).manifest["notices"] if name in text]
        assert any(text.endswith(f"damaged or edited line: {i + 1}") for text in said)
        assert f"damaged or edited line: {i + 1}" in (run / "report.html").read_text()


def test_an_edited_validation_loss_does_not_choose_the_model(tmp_path):
    tables = experiment(tmp_path, data={"val_fraction": 0.2}, run={"patience": 3})
    run_stopped(tables, tmp_path / "run", progress=StopAfter(2))
    log = tmp_path / "run/metrics.jsonl"
    log.write_text(log.read_text().replace('"val_loss": ', '"val_loss": 9', 1))
    with pytest.raises(Lost, match=r"metrics\.jsonl has a damaged or edited line: 1"):
        fedfm.resume(tmp_path / "run", progress=QUIET)


def test_lines_without_a_checksum_are_read(tmp_path):
    path = tmp_path / logs.METRICS
    path.write_text('{"round": 0, "loss": 1.5}\n{"round": 1, "crc32": "00000000"}\n{"crc32": 3, "round": 2}\n')
    logs.append(path, '{"round": 3}\n{"round": 4, "name": "\u2028\udc80"}\n')
    assert logs.rounds(path) == [{"round": 0, "loss": 1.5}, {"round": 3}, {"round": 4, "name": "\u2028\udc80"}]


def test_damaged_and_missing_arrays_of_rounds_are_named(tmp_path):
    tables = experiment(tmp_path, method={"name": "fedamp", "rounds": 5})
    run_stopped(tables, tmp_path / "run", progress=StopAfter(4))
    flip(tmp_path / "run/arrays/round-000002.npz")
    with open(tmp_path / "run/arrays/round-000002.npz", "r+b") as file:
        file.truncate(100)
    (tmp_path / "run/arrays/round-000003.npz").unlink()
    fedfm.resume(tmp_path / "run", progress=QUIET)
    said = [text for text in fedfm.load_run(tmp_path / "run").manifest["notices"] if "arrays/" in text]
    assert said == ["arrays/ has damaged or missing files: the joined arrays lack rounds 2, 3"]
    assert np.load(tmp_path / "run/weights.npz")["rounds"].tolist() == [1, 4, 5]


def test_a_folder_whose_description_is_damaged_is_refused(tmp_path):
    fedfm.run(experiment(tmp_path, method={"name": "local", "rounds": 1}), tmp_path / "run", progress=QUIET)
    (tmp_path / "run/clients/client-00/adapter/fedfm.json").write_text("{")
    with pytest.raises(InputError, match=r"fedfm\.json is not the file that this run wrote"):
        fedfm.predict(tmp_path / "run", tmp_path / "rows.npz", "client-00")
