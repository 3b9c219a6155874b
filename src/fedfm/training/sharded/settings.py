"""Settings of a client's group of processes, and what such a group cannot compute."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedfm.errors import InputError
from fedfm.models import devices
from fedfm.models.locate import BUILT_IN
from fedfm.models.spec import ModelSpec

ADAPTATIONS = ("lora", "ffa_lora", "head", "top_layers", "full")
KEY = "run.processes_per_client"


PATIENCE = 0.25  # share of run.timeout after which a group hangs, so that it can still answer when it starts again


@dataclass(frozen=True)
class GroupSettings:
    """A client's group of processes.

    Attributes:
        processes: number of processes, which are called ranks.
        launch: a command line that starts the ranks, e.g. on several machines; "": this process starts them here.
        limit: largest number of seconds without progress of any rank.
        device: ``model.device``.
        deterministic: ``run.deterministic``.
        key: the setting that asks for the group, for messages.
    """

    processes: int
    launch: str = ""
    limit: float = 600.0
    key: str = KEY
    device: str = "auto"
    deterministic: bool = False


def check_model(spec: ModelSpec, key: str = KEY) -> None:
    """Refuse a [model] table whose weights cannot be shared among processes.

    Raises:
        InputError: the message says why.
    """
    adaptation = spec.adaptation
    why = ""
    if spec.name == "features" or spec.name in BUILT_IN:
        why = f"model.name = {spec.name!r} is not a folder or hub id with safetensors, which processes could read "
        why += "in parts"
    elif spec.weights == "random":
        why = 'model.weights = "random" has no file that processes could read in parts: save the model first'
    elif spec.quantization == "int8":
        why = 'model.quantization = "int8" is computed by one process; expected "nf4", or dtype = "bfloat16"'
    elif spec.compile is not None:
        why = "model.compile: compiled blocks cannot collect their weights from other processes; drop it"
    elif spec.device == devices.MAP or ":" in spec.device:
        why = f'model.device = "{spec.device}": each process takes a device of its own; expected auto, cpu or cuda'
    elif spec.device == "mps":
        why = 'model.device = "mps": torch shares weights on cpu and cuda only'
    elif adaptation is not None and adaptation.name not in ADAPTATIONS:
        why = (
            f'model.adaptation.name = "{adaptation.name}" is trained by one process; expected {", ".join(ADAPTATIONS)}'
        )
    elif adaptation is not None and adaptation.dora:
        why = "model.adaptation.dora reads the norms of whole matrices, of which each process has a part; drop it"
    if why:
        raise InputError(f"{key}: {why}", key=key)


def place_of(name: str) -> str:
    """A text that is the same for processes of one machine that see the same model folder under this name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = boot.read_text().strip() if boot.exists() else ""
    path = Path(name)
    if not machine or not path.exists():
        return f"{machine} {name}"
    about = path.stat()
    return f"{machine} {about.st_dev} {about.st_ino}"
