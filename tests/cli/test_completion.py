"""``fedfm completion``: in a real bash, the Tab key completes commands, arguments, names and files."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time

import pytest

from fedfm.api.command_registry import commands as wing_commands
from fedfm.cli import main

pytest.importorskip("shtab", reason="needs the extra completion")
LIMIT = 20  # seconds


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """The script for bash, as the command prints it, next to an experiment, another file and a folder."""
    folder = tmp_path_factory.mktemp("completion")
    done = subprocess.run([sys.executable, "-m", "fedfm", "completion", "bash"], capture_output=True, check=True)
    (folder / "fedfm.bash").write_bytes(done.stdout)
    for name in ("mine.toml", "minutes.csv"):
        (folder / name).touch()
    (folder / "finished").mkdir()
    return folder / "fedfm.bash"


def typed(script, keys):
    """The line that bash has after these keys, Tab among them: it is printed instead of run."""
    lead, follow = pty.openpty()
    bash = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        stdin=follow,
        stdout=follow,
        stderr=follow,
        cwd=script.parent,
        env={**os.environ, "PS1": "", "TERM": "dumb", "INPUTRC": "/dev/null"},
        start_new_session=True,
    )
    os.close(follow)
    shown, end = "", time.monotonic() + LIMIT
    try:
        for line in (f"source {script.name}; echo rea''dy\n", f"{keys}\x05 >>>\x01echo '<<< \x05'\n"):
            os.write(lead, line.encode())
            wanted = r"ready\r" if line.startswith("source") else r"\n<<< (.*) >>>\r"
            while not (found := re.search(wanted, shown)):
                assert time.monotonic() < end, shown
                if select.select([lead], [], [], 0.1)[0]:
                    shown += os.read(lead, 4096).decode()
        return found[1].strip()
    finally:
        bash.kill()
        bash.wait()
        os.close(lead)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ("fedfm aud\t", "fedfm audit"),
        ("fedfm run --base\t", "fedfm run --baselines"),
        ("fedfm run mi\t", "fedfm run mine.toml"),  # and not minutes.csv
        ("fedfm run mine.toml --engine sim\t", "fedfm run mine.toml --engine simulation"),
        ("fedfm report f\t", "fedfm report finished"),  # and not fedfm.bash
        ("fedfm predict finished minu\t", "fedfm predict finished minutes.csv"),
        ("fedfm show fedba\t", "fedfm show fedbaf"),
        ("fedfm show regr\t", "fedfm show regression"),
        ("fedfm audit finished --attack text\t", "fedfm audit finished --attack text_canaries"),
    ],
)
def test_the_tab_key_completes(keys, line, script):
    assert typed(script, keys).rstrip("/ ") == line


def test_every_command_is_in_the_script(capsys):
    for shell in ("bash", "zsh"):
        assert main(["completion", shell]) == 0
        text = capsys.readouterr().out
        assert {c.name for c in wing_commands()} | {"run", "doctor", "completion"} <= set(re.findall(r"[\w-]+", text))


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_can_read_its_script(capsys, tmp_path):
    main(["completion", "zsh"])
    (tmp_path / "_fedfm").write_text(capsys.readouterr().out)
    subprocess.run(["zsh", "-n", tmp_path / "_fedfm"], check=True)


def test_without_shtab_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    assert capsys.readouterr().err == 'fedfm: fedfm completion needs shtab: pip install "fedfm[completion]"\n'
