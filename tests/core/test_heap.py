"""The memory that a process keeps after it was freed."""

import subprocess
import sys

import pytest

COUNT = """
import resource, sys
import numpy as np
from fedfm.linalg.kernels.buffers import keep_all_freed

if sys.argv[1] == "kept" and not keep_all_freed():
    sys.exit("no glibc")
for turn in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    x = np.ones(int(sys.argv[2]) << 17)
    del x
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.proof
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc")
@pytest.mark.parametrize("megabytes", [48, pytest.param(2500, marks=pytest.mark.release)])
def test_a_large_array_takes_the_place_of_the_last_one(megabytes):
    """Page faults of the second of two arrays, with and without."""
    faults = {}
    for how in ("kept", "not"):
        done = subprocess.run([sys.executable, "-c", COUNT, how, str(megabytes)], capture_output=True, text=True)
        if "no glibc" in done.stderr:
            pytest.skip("of glibc")
        assert done.returncode == 0, done.stderr
        faults[how] = int(done.stdout)
    assert faults["kept"] < 10 < faults["not"]
