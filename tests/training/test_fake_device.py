"""Local training on a fake device other than the CPU: no operation mixes devices, and the host seldom waits."""

import collections
import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedfm.core.client import Client, ClientData, Terms
from fedfm.core.rows import Rows
from fedfm.data.table import Table
from fedfm.models.adapters.adaptation import live_head
from fedfm.models.load import load_model
from fedfm.models.model import Model
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.training import SGD, AdamW, loop
from fedfm.training.local_job import Job
from fedfm.training.scheduler import train_client

DEVICE = "lazy"  # not the CPU, and every build of PyTorch knows it
ROWS, BATCH = 16, 4
PICTURES = Table(
    "image",
    np.random.default_rng(0).integers(0, 255, (ROWS, 32, 32, 3)).astype(np.uint8),
    np.arange(ROWS) % 2,
    ("x", "y"),
    np.array(["train"] * ROWS),
)


class Counted(TorchDispatchMode):
    """Counts copies between the devices, and reads of a value, for which the host waits."""

    def __init__(self):
        super().__init__()
        self.seen = collections.Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.overloadpacket.__name__
        came = [x.device.type for x in tree_leaves((args, kwargs or {})) if isinstance(x, torch.Tensor)]
        out = operation(*args, **(kwargs or {}))
        if name in ("_to_copy", "copy_"):
            source, target = (came[-1], came[0]) if name == "copy_" else (came[0], out.device.type)
            if source != target:
                self.seen["to the device" if target == DEVICE else "to the host"] += 1
        if name in ("_local_scalar_dense", "nonzero", "item") and DEVICE in came:
            self.seen["reads"] += 1
        return out


class Pretended:
    """Rows whose batches are made outside of the mode, as a data loader makes them."""

    def __init__(self, rows, mode):
        self.rows, self.mode, self.labels = rows, mode, rows.labels
        self.tokens, self.tensors = rows.tokens, rows.tensors
        self.deferred, self.augment = rows.deferred, rows.augment

    def __len__(self):
        return len(self.rows)

    def batch(self, index):
        with unset_fake_temporarily():
            batch = self.rows.batch(index)
        return {name: self.mode.from_tensor(tensor) for name, tensor in batch.items()}


def pretended(adaptation, mode):
    """(nano-vit on the device, its rows)."""
    with unset_fake_temporarily():
        real = load_model(
            ModelSpec("nano-vit", adaptation=adaptation, device="cpu"),
            classes=PICTURES.classes,
            kind="image",
            task="classification",
        )
        rows: Rows = real.prepare(PICTURES, range(ROWS))
    for module in real.module.modules():
        for name, tensor in itertools.chain(module._parameters.items(), module._buffers.items()):
            if tensor is None:
                continue
            with unset_fake_temporarily():
                wanted, value = tensor.requires_grad, tensor.detach()
            moved = mode.from_tensor(value).to(DEVICE)
            if isinstance(tensor, nn.Parameter):
                module._parameters[name] = nn.Parameter(moved, requires_grad=wanted)
            else:
                module._buffers[name] = moved
    head = live_head(real.module, real.parts.head)
    told = {"spec": real.spec, "task": real.task, "classes": real.classes, "parts": real.parts, "tools": real.tools}
    return Model(real.module, **told, fingerprint="x", head=head), Pretended(rows, mode)


@pytest.fixture
def reads(monkeypatch):
    """How often a tensor on the device was read as a number."""
    seen = collections.Counter()

    def read(self):
        seen[self.device.type] += 1
        return 0.5

    monkeypatch.setattr(FakeTensor, "__float__", read, raising=False)
    return seen


LORA, FULL = AdaptationSpec("lora", rank=2), AdaptationSpec("full")


@pytest.mark.proof
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(
    ("adaptation", "local", "more"),
    [
        (LORA, AdamW(batch_size=BATCH, micro_batch=2, max_grad_norm=1.0), {"mu": 0.1}),
        (FULL, SGD(batch_size=BATCH), {"correction": True}),
    ],
    ids=["in parts, clipped, proximal", "full, corrected"],
)
def test_a_round_copies_batches_to_the_device_and_reads_one_number(adaptation, local, more, reads):
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        model, rows = pretended(adaptation, mode)
        w = model.params()
        if more.get("correction"):
            more = {"correction": 0.1 * w}
        data = ClientData(lambda: rows, lambda: rows, lambda: rows)
        client = Client(
            id="a", data=data, model=model, memory={}, seed=0, secret=lambda name: b"0" * 32, trainer=train_client
        )
        reads.clear()
        with Counted() as counted:
            loop.train([Job(client, w, local, Terms(**more))])
    batches, tensors = ROWS // (local.micro_batch or BATCH), len(model.names)
    # Pixels and labels of each batch, the parameters, and what corrects the gradients.
    assert counted.seen["to the device"] <= 2 * batches + tensors + 1
    assert counted.seen["to the host"] <= tensors  # the result
    assert reads[DEVICE] + counted.seen["reads"] == 1  # the mean loss of the round
