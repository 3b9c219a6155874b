"""Fixtures of all tests: import paths, one thread, no network, and no waiting for the disk."""

import gc
import hashlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if os.environ.get("FEDFM_TESTS_SEE_GPUS") != "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # exact figures are of a CPU; `make test-gpu` shows the GPU
os.environ["FEDFM_CACHE"] = ""  # a test that reads what an earlier run has computed says so

import hypothesis
import pytest
import torch

# The suite is the same every time; FEDFM_RANDOM_TESTS=1 looks for new cases. No test fails since a machine is slow.
_RANDOM = os.environ.get("FEDFM_RANDOM_TESTS") == "1"
hypothesis.settings.register_profile("fedfm", derandomize=not _RANDOM, deadline=None)
hypothesis.settings.load_profile("fedfm")

gc.disable()  # until all tests are collected
torch.set_num_threads(1)
if not os.environ.get("CUDA_VISIBLE_DEVICES"):
    # Where there is no GPU, each seed is kept for one with the stack of its caller, which is deep under pytest.
    torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = lambda seed: None
os.fsync = lambda file: None  # nobody cuts the power here; runs in processes of their own still wait for the disk


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items):
    import tiers

    tiers.mark(items)


def pytest_collection_finish():
    """Leave what was imported and collected, a million objects, out of each search for garbage."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def asked(monkeypatch):
    """The names of the tasks that the code under test asks for: only their files would be imported."""
    from fedfm.core import tasks

    found = {}
    monkeypatch.setattr(tasks, "_imported", found)
    tasks.available.cache_clear()
    return found.keys()


@pytest.fixture
def coarse_accounting(monkeypatch):
    """Privacy losses on a coarser grid, which takes a tenth of the time: still an upper bound."""
    from fedfm.privacy import composition

    monkeypatch.setattr(composition, "FINE", composition.COARSE)


@pytest.fixture
def own_identities(monkeypatch):
    """Identities of a secure sum that differ by client, as they must, also where a test gives all the same secrets."""
    from fedfm.aggregation import _secagg, _secagg_client

    for module in (_secagg, _secagg_client):
        monkeypatch.setattr(module, "identity_of", lambda client: hashlib.sha256(str(client.id).encode()).digest())


@pytest.fixture
def known_secrets(monkeypatch, own_identities):
    """Secrets that a test knows."""
    from fedfm.runtime import client_memory

    monkeypatch.setattr(client_memory, "entropy", lambda n: b"\x07" * n)


@pytest.fixture(autouse=True)
def _no_workers_left():
    """End the workers that a test's federations started."""
    yield
    import toy

    while toy.LINKS:
        toy.LINKS.pop().close()
