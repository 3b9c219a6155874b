"""A new folder gets all of its files, or none that a program could mistake for a complete folder."""

import os
import signal

import pytest

from fedfm.core import new_folders
from fedfm.errors import InputError

MODELS = [
    ("README.md", "config.json", "model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json", "vocab"),
    ("README.md", "config.json", "model.safetensors", "preprocessor_config.json"),
    ("README.md", "adapter_config.json", "adapter_model.safetensors", "base", "config.json"),
    ("README.md", "fedfm.json", "model.safetensors"),
]


def write(folder, names, kill_before=None):
    """Fill the folder; the process is killed before it moves this file."""
    replace = os.replace

    def replace_or_die(source, target):
        if source.name == kill_before:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    os.replace = replace_or_die
    try:
        with new_folders.fill(folder, "exporting") as half:
            for name in names:
                (half / name).write_text(name)
    finally:
        os.replace = replace


def is_loadable(names, found):
    """Whether a library would open the files that it found as this model."""
    opened = "adapter_config.json" if "adapter_config.json" in names else "config.json"
    weights = [name for name in names if "model" in name and name.endswith((".safetensors", ".json"))]
    return {*weights, *({opened} & {*names})} <= found


@pytest.mark.parametrize("names", MODELS)
def test_a_kill_leaves_nothing_that_loads_and_lacks_a_file(names, tmp_path):
    for i, name in enumerate(names):
        folder = tmp_path / str(i)
        pid = os.fork()
        if not pid:
            write(folder, names, kill_before=name)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        found = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
        assert not is_loadable(names, found)


def write_and_fail(folder, error):
    with new_folders.fill(folder, "exporting") as half:
        (half / "a").write_text("a")
        raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, InputError])
def test_an_error_leaves_nothing(error, tmp_path):
    (tmp_path / "made before").mkdir()
    for folder in (tmp_path / "new", tmp_path / "made before"):
        with pytest.raises(error):
            write_and_fail(folder, error)
    assert [path.name for path in tmp_path.rglob("*")] == ["made before"]


def test_the_rest_of_a_killed_process_is_replaced_and_nothing_else(tmp_path):
    pid = os.fork()
    if not pid:
        write(tmp_path / "new", ("a", "b"), kill_before="a")
        os._exit(0)
    os.waitpid(pid, 0)
    write(tmp_path / "new", ("c",))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["c"]
    for folder in (tmp_path / "new", tmp_path / "new" / "c"):
        with pytest.raises(InputError, match=r"give another"):
            write(folder, ("d",))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["c"]


def test_a_signal_while_a_temporary_folder_is_removed_leaves_nothing(tmp_path, monkeypatch):
    """Such a folder has secrets and memories of clients."""
    monkeypatch.setattr(new_folders.tempfile, "tempdir", str(tmp_path))
    removed = []

    def stop(path):
        if not removed:
            removed.append(path)
            raise KeyboardInterrupt
        remove(path)

    remove = new_folders.storage.remove
    monkeypatch.setattr(new_folders.storage, "remove", stop)
    with pytest.raises(KeyboardInterrupt), new_folders.temporary_folder() as folder:
        (folder / "noise.secret").write_text("secret")
    assert (len(removed), list(tmp_path.iterdir())) == (1, [])
