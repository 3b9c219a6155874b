"""The processor features for which loops are compiled."""

import os
import subprocess
import sys

import pytest

_SHOWN = """
import numba
import fedfm.linalg.kernels.jit
print(numba.config.CPU_FEATURES)
"""


def shown(**environment):
    left = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_CPU")}
    told = subprocess.run(
        [sys.executable, "-c", _SHOWN], env=left | environment, check=True, capture_output=True, text=True
    )
    return told.stdout.strip()


def test_settings_of_the_environment_are_kept():
    assert shown(NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="+sse2") == "+sse2"
    assert shown(NUMBA_CPU_NAME="generic") in ("", "None")


def test_full_registers_are_used_on_processors_with_avx512():
    from llvmlite import binding

    from fedfm.linalg.kernels.jit import LOWER_CLOCK

    has = binding.get_host_cpu_features().get("avx512f") and binding.get_host_cpu_name() not in LOWER_CLOCK
    if not has:
        pytest.skip("this processor has no 512-bit registers at full clock")
    features = shown().split(",")
    assert features[-1] == "-prefer-256-bit"
    assert "+avx512f" in features
