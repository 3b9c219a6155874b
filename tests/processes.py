"""What the engine tests share: experiments as files, the command line, processes that mention a folder."""

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from fedfm.cli import main

ENV = {
    **os.environ,
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
}


def experiment(
    folder: Path, *, method: str, adaptation: str = '{ name = "head" }', run: str = "", data: str = ""
) -> Path:
    """Digits, three iid clients."""
    path = folder / "exp.toml"
    path.write_text(
        '[data]\nname = "digits"\npartition = { name = "iid", clients = 3 }\nlimit = 300\n'
        f'[model]\nname = "nano-vit"\nadaptation = {adaptation}\n[method]\n{method}\n[run]\nseed = 3\n{run}\n'
    )
    return path


def fedfm(*args: Any, code: int = 0) -> dict[str, Any]:
    """The command line's result line."""
    done = subprocess.run([sys.executable, "-m", "fedfm", *map(str, args), "--format", "json"], **_pipes(), check=False)
    assert done.returncode == code, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1]) if code == 0 else {"stderr": done.stderr}


def here(*args: Any) -> dict[str, Any]:
    """The result line of a command that ends well, in this process, which has loaded the libraries already."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main([*map(str, args), "--format", "json"])
    assert code == 0
    return json.loads(out.getvalue().strip().splitlines()[-1])


def on_engine(engine: str, *args: Any) -> dict[str, Any]:
    """The result line of a command that ends well, whose run is on an engine of Flower's.

    All parties of a deployment have processes of their own, so its command may run in this one. Ray would leave files
    open here.
    """
    return here(*args) if engine == "deployment" else fedfm(*args)


def begin(*args: Any) -> subprocess.Popen:
    """The command line in the background, in a group of its own."""
    command = [sys.executable, "-m", "fedfm", *map(str, args), "--format", "json"]
    return subprocess.Popen(command, **_pipes(), start_new_session=True)


def _pipes() -> dict[str, Any]:
    return {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": ENV}


def until(ready, limit: float = 600.0, what: str = "it did not happen") -> None:
    """Wait; the limit is for what never comes, and no claim of how fast anything is."""
    end = time.monotonic() + limit
    while not ready():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def rounds(out: Path) -> int:
    """Lines of metrics so far."""
    log = out / "metrics.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


def mentioning(folder: Path) -> list[str]:
    """Command lines of the processes that mention a folder, without our own."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(folder) in line:
                found.append(f"{entry.name} {line[:150]}")
    return found


SAME = ("params_sha256", "bytes_up", "bytes_down", "accuracy", "client_accuracy")


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Bits, bytes and figures agree."""
    assert {k: a[k] for k in SAME} == {k: b[k] for k in SAME}
