"""Commands in this process, and trainings in one place (`fedfm pretrain`, `fedfm distil`): lines by epoch, a kill."""

import os
import signal
import subprocess
import sys
import time

from fedfm.cli import main
from fedfm.runtime.progress import EpochProgress


def call(capsys, *args):
    """(exit code, stdout, stderr)."""
    code = main([str(a) for a in args])
    out = capsys.readouterr()
    return code, out.out, out.err


class Lines(EpochProgress):
    """Keeps the lines; raises after so many steps."""

    def __init__(self, steps=10**9):
        self.lines, self.left = [], steps

    def step(self):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt

    def epoch(self, line):
        self.lines.append(dict(line))


def kill_after_an_epoch(command, file, out):
    """Start ``fedfm COMMAND FILE`` as a process, and kill it when its first checkpoint is there."""
    words = [sys.executable, "-m", "fedfm", command, str(file), "--out", str(out)]
    process = subprocess.Popen(
        words, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    deadline = time.monotonic() + 300
    while not list(out.glob("checkpoint/epoch-*")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
