"""Commands import PyTorch without collections of garbage; afterwards Python collects garbage as before."""

import json
import subprocess
import sys

PROGRAM = """
import gc, json
from fedfm.cli.imports import quick_imports
before = gc.isenabled()
collections = sum(of["collections"] for of in gc.get_stats())
with quick_imports():
    import torch
    during = gc.isenabled()
made = sum(of["collections"] for of in gc.get_stats()) - collections
frozen = gc.get_freeze_count()
with quick_imports():
    again = gc.isenabled()
print(json.dumps([before, during, made, frozen, again, gc.isenabled(), gc.get_freeze_count() == frozen]))
"""


def test_an_import_of_torch_is_left_out_of_collections_once() -> None:
    out = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
    before, during, made, frozen, again, after, same = json.loads(out)
    assert (before, during, made, again, after, same) == (True, False, 0, True, True, True)
    assert frozen > 50_000


def test_a_failed_import_leaves_collections_on() -> None:
    program = PROGRAM.split("with")[0] + (
        "try:\n    with quick_imports():\n        import fedfm.no_such_module\n"
        "except ImportError:\n    print(json.dumps([gc.isenabled(), gc.get_freeze_count()]))\n"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert json.loads(out) == [True, 0]
