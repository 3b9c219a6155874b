"""A training in one place, as `fedfm pretrain` and `fedfm distil` have it: its command, and its lines by epoch."""

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
