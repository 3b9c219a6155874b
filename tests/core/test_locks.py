"""Locks on folders: one of several processes owns a folder, and the others change no byte of it."""

import hashlib
import os
import resource
import signal
import stat
import subprocess
import sys
import time

import numpy as np
import pytest

import fedfm
from fedfm.api import execute, predict, prediction_files, signature, studies
from fedfm.api.model_folder import claim
from fedfm.cli.entry import main
from fedfm.config.experiment import Experiment
from fedfm.config.toml import to_toml
from fedfm.core import storage
from fedfm.core.locks import Lock, alone_in
from fedfm.errors import InputError, RunError
from fedfm.runtime.progress import Progress
from fedfm.runtime.run_directory import Run
from small import experiment

QUIET = Progress()


def at_once(count, act):
    """Exit codes of so many processes that begin ``act`` at the same moment: 0 done, 2 refused in one line, else 1."""
    gate, go = os.pipe()
    children = []
    for number in range(count):
        if (child := os.fork()) == 0:
            code = 1
            try:
                os.read(gate, 1)
                act(number)
                code = 0
            except InputError as error:
                code = 2 if "\n" not in str(error) else 1
            finally:
                os._exit(code)
        children.append(child)
    os.write(go, b"x" * count)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    os.close(gate)
    os.close(go)
    return sorted(codes)


def contents(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def tables(folder, rounds=3, workers=1):
    method = {"name": "fedavg", "rounds": rounds, "local": {"learning_rate": 0.1}}
    return Experiment.from_dict(experiment(folder, method=method, run={"workers": workers}))


def test_only_one_of_several_runs_in_one_folder_runs_to_its_end(tmp_path):
    exp = tables(tmp_path)
    alone = fedfm.run(exp, tmp_path / "alone", progress=QUIET)
    assert at_once(5, lambda number: fedfm.run(exp, tmp_path / "run", progress=QUIET)) == [0, 2, 2, 2, 2]
    kept = fedfm.load_run(tmp_path / "run")
    assert kept.manifest["result"]["params_sha256"] == alone["params_sha256"]
    assert [line["round"] for line in kept.metrics()] == [0, 1, 2, 3]
    before = contents(tmp_path / "run")
    assert at_once(3, lambda number: fedfm.run(exp, tmp_path / "run", progress=QUIET)) == [2, 2, 2]
    assert contents(tmp_path / "run") == before


def test_wrong_runs_in_one_folder_leave_nothing_behind(tmp_path):
    """Each of them discards what it has made, and none what another has made."""
    wrong = Experiment.from_dict(experiment(tmp_path) | {"data": {"path": str(tmp_path / "absent.npz")}})
    good = tables(tmp_path, rounds=1)
    for _ in range(5):
        place = tmp_path / "run"
        codes = at_once(4, lambda n: fedfm.run(wrong if n else good, place, progress=QUIET))  # noqa: B023
        assert codes[1:] == [2, 2, 2]
        if codes[0] == 0:
            assert fedfm.load_run(place).manifest["result"] is not None
            return
        assert not place.exists()  # another one's input was read first
    pytest.fail("the good run was refused each time")


def test_only_one_of_several_resumes_continues_and_reads_the_newest_state(tmp_path):
    exp = tables(tmp_path)
    straight = fedfm.run(exp, tmp_path / "straight", progress=QUIET)
    stale = Run.create(exp, tmp_path / "run")
    with stale.lock():
        pass
    assert set(at_once(4, lambda number: fedfm.resume(tmp_path / "run", progress=QUIET))) <= {0, 2}
    done = contents(tmp_path / "run")
    assert stale.manifest["result"] is None  # as it was read
    assert execute.drive(stale, QUIET, fresh=False)["params_sha256"] == straight["params_sha256"]
    assert contents(tmp_path / "run") == done


def test_only_one_process_can_add_rounds(tmp_path):
    fedfm.run(tables(tmp_path), tmp_path / "run", progress=QUIET)
    codes = at_once(3, lambda number: fedfm.resume(tmp_path / "run", rounds=5, progress=QUIET))
    assert codes[0] == 0
    assert set(codes) <= {0, 2}
    assert [line["round"] for line in fedfm.load_run(tmp_path / "run").metrics()] == list(range(6))


def test_only_one_process_can_run_a_study(tmp_path):
    exp = tables(tmp_path, rounds=1)

    def act(number):
        studies.seeds(exp, [0, 1], tmp_path / "study", QUIET)

    act(0)
    finished = contents(tmp_path / "study")
    with alone_in(tmp_path / "study", "running a study"):
        assert at_once(2, act) == [2, 2]
    assert contents(tmp_path / "study") == finished
    assert stat.S_IMODE((tmp_path / "study").stat().st_mode) == 0o700


@pytest.mark.proof
def test_only_one_process_can_write_an_export_or_predictions(tmp_path):
    fedfm.run(tables(tmp_path, rounds=1), tmp_path / "run", progress=QUIET)
    for out in (tmp_path / f"model-{number}" for number in range(5)):
        codes = at_once(4, lambda number, out=out: predict.export(tmp_path / "run", "torch", out))
        assert codes == [0, 2, 2, 2]
        assert any(path.suffix == ".safetensors" for path in out.iterdir())

    result = {"predictions": ["a"], "probabilities": [[1.0]]}
    codes = at_once(4, lambda number: prediction_files.write(result | {"by": number}, tmp_path / "rows.json"))
    assert codes == [0, 2, 2, 2]
    assert list(tmp_path.glob(".rows.json.*")) == []


def test_a_refused_process_removes_no_folder_of_the_owner(tmp_path):
    """The owner has the lock, and has written nothing yet."""
    with alone_in(tmp_path / "f", "working"):
        for _ in range(3):
            with (
                pytest.raises(InputError, match="another process is working here"),
                alone_in(tmp_path / "f", "working"),
            ):
                pass
            assert (tmp_path / "f").is_dir()
    assert not (tmp_path / "f").exists()  # it stayed empty
    (tmp_path / "f").mkdir()
    with alone_in(tmp_path / "f", "working"):
        pass
    assert (tmp_path / "f").is_dir()  # it was there before


def test_only_one_process_can_write_a_model_folder(tmp_path):
    def act(number):
        with claim(tmp_path / "model", "made.json", "making", {"seed": 1}, 1, ("made.json", "checkpoint")):
            time.sleep(0.3)

    assert at_once(4, act) == [0, 2, 2, 2]


_HOLDER = """
import sys, time
from pathlib import Path
from fedfm.core.locks import Lock
lock = Lock(Path(sys.argv[1]))
assert lock.take()
import os
if os.fork() == 0:
    time.sleep(60)
    os._exit(0)
print("taken", flush=True)
time.sleep(60)
"""


def test_a_lock_ends_with_its_process_even_if_a_child_survives(tmp_path):
    place = tmp_path / "lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(place)], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        holder.stdout.readline()
        lock = Lock(place)
        assert not lock.take()
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        end = time.monotonic() + 60  # a child that has not run yet still has its copy
        while not (taken := lock.take()) and time.monotonic() < end:
            time.sleep(0.01)
        assert taken
        lock.release()
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        holder.stdout.close()


def test_a_lock_on_a_removed_file_does_not_lock_its_successor(tmp_path):
    first, second, third = (Lock(tmp_path / "lock") for _ in range(3))
    assert first.take()
    (tmp_path / "lock").unlink()
    assert second.take()  # of the new file
    first.release()
    assert not third.take()
    second.release()
    assert third.take()
    third.release()


def test_discarding_under_a_lock_removes_only_the_owners_files(tmp_path):
    """As soon as the lock is gone the folder may be another's: nothing is removed after it but empty folders."""
    folder = tmp_path / "run"
    (folder / "private").mkdir(parents=True)
    for name in ("manifest.json", "private/lock", "private/key"):
        (folder / name).write_text("")
    (folder / "notes.txt").write_text("mine")
    storage.discard(folder, ("manifest.json", "private"), folder / "private" / "lock")
    assert [path.name for path in folder.rglob("*")] == ["notes.txt"]


# --- whose they are --------------------------------------------------------------------------------------------------


def _mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(("shared", "expected"), [(False, 0o700), (True, 0o755)])
@pytest.mark.parametrize("there", [False, True])
def test_a_run_directory_is_private_to_its_owner_by_default(tmp_path, shared, expected, there):
    old = os.umask(0o022)
    try:
        out = tmp_path / "run"
        if there:
            out.mkdir()
        fedfm.run(Experiment.from_dict(experiment(tmp_path, run={"workers": 1, "shared": shared})), out, progress=QUIET)
    finally:
        os.umask(old)
    assert _mode(out) == expected
    assert _mode(out / "private") == 0o700


# --- disks -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with a signed run, its experiment and rows; nothing that fails changes a byte of the run."""
    folder = tmp_path_factory.mktemp("full")
    (folder / "exp.toml").write_text(to_toml(experiment(folder, run={"workers": 1})))
    with np.load(folder / "rows.npz") as rows:
        np.savez(folder / "new.npz", **{key: rows[key] for key in ("x", "y", "classes")})
    fedfm.run(folder / "exp.toml", folder / "run", progress=QUIET)
    signature.sign(folder / "run", folder / "key.pem")
    return folder


def on_a_full_disk(folder, most, command):
    """(exit code, stderr) of a command in a child for which no file becomes longer than ``most`` bytes."""
    out, into = os.pipe()
    if (child := os.fork()) == 0:
        code = 70
        try:
            os.chdir(folder)
            os.dup2(into, 2)
            sys.stderr = sys.__stderr__ = open(2, "w", closefd=False)  # noqa: SIM115
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
            code = main(command)
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(into)
    with open(out) as file:
        said = file.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said


@pytest.mark.parametrize(
    ("command", "place"),
    [
        ("run exp.toml --out other", "other/manifest.json"),
        ("report run", "run/report.html"),
        ("audit run --attack update_membership", "run/audit.json"),
        ("sign run --key key.pem", "run/signature.json"),
        ("export run --to torch --out model", "model"),
        ("predict run new.npz --out new.csv", "new.csv"),
        ("compare run run --out page.html", "page.html"),
        ("join run new.npz", "run/clients/newcomer"),
        ("resume run --rounds 5", "run/manifest.json"),
        ("schema --out schema.json", "schema.json"),
        ("app app", "app"),
    ],
)
def test_a_full_disk_is_reported_in_one_line_and_no_file_changes(finished, command, place):
    before = contents(finished / "run")
    code, said = on_a_full_disk(finished, 8, command.split())
    assert code == 1, said
    assert "Traceback" not in said
    assert place in said.strip().splitlines()[-1]
    assert "the disk is full" in said.strip().splitlines()[-1]
    now = contents(finished / "run")
    assert {name: now.get(name) for name in before} == before


def test_an_error_without_a_file_name_names_the_folder_without_room(tmp_path):
    full, odd = OSError(28, "No space left on device"), OSError(5, "Input/output error")
    assert storage.place_of(OSError(28, "", "a/b"), ()) is not None
    assert str(storage.place_of(OSError(28, "No space left", "a/b"), ())) == "a/b"
    assert str(storage.place_of(full, (tmp_path,))) == "a file"
    assert storage.place_of(odd, (tmp_path,)) is None
    sys_is_no_disk = [path for path in ("/sys", "/proc") if os.statvfs(path).f_bavail == 0]
    for path in sys_is_no_disk:
        assert str(storage.place_of(full, (tmp_path, type(tmp_path)(path)))) == path


def test_errors_of_libraries_that_hide_their_number_name_the_place(tmp_path):
    with pytest.raises(RunError, match=r"cannot write .*model: the disk is full"), storage.writing(tmp_path / "model"):
        raise ValueError("Error while serializing: I/O error: No space left on device (os error 28)")
    with pytest.raises(ValueError, match="another"), storage.writing(tmp_path / "model"):
        raise ValueError("another")
