"""Stands for torchrun or srun in tests: imports once, forks the ranks of a group, and lets one of them fail.

python forked_ranks.py COUNT FAULT FOLDER [the program that a real launcher would start]
"""

import os
import signal
import sys
import time
from pathlib import Path

import peft  # noqa: F401 - so that the ranks share the imports
import torch
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama  # noqa: F401

import fedfm.models.adapters.lora
import fedfm.models.hub
import fedfm.training.loop  # noqa: F401
from fedfm.training.sharded import lockstep, rank

COUNT, FAULT, FOLDER = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])


def once() -> bool:
    """Whether this fault did not occur yet."""
    marker = FOLDER / f"{FAULT}.done"
    if marker.exists():
        return False
    marker.touch()
    return True


def fail(number: int) -> None:
    """Prepare the fault in the last rank."""
    train = lockstep.train
    if FAULT == "gpus":
        rank.gpu_of = lambda local: "GPU-7"
    if number != COUNT - 1 or FAULT == "none":
        return

    def failing(model, work, say):
        if FAULT == "memory" and work.most > 2:
            raise torch.OutOfMemoryError("of the device")
        if FAULT == "error":
            raise ValueError("a defect")
        if FAULT == "killed" and once():
            os.kill(os.getpid(), signal.SIGKILL)
        if FAULT == "killed again":
            os.kill(os.getpid(), signal.SIGKILL)
        if FAULT == "stopped" and once():
            os.kill(os.getpid(), signal.SIGSTOP)
        if FAULT == "asleep" and once():
            time.sleep(600)
        return train(model, work, say)

    lockstep.train = failing
    if FAULT == "version":
        rank.__version__ = "0.0"
    if FAULT == "exit":
        raise SystemExit("no licence")


children = []
for number in range(COUNT):
    pid = os.fork()
    if pid:
        children.append(pid)
        continue
    local = number
    if FAULT == "weights" and number == COUNT - 1:
        os.chdir(FOLDER)
        local = 0  # as on another machine
    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(COUNT), "LOCAL_RANK": str(local)}
    try:
        fail(number)
        rank.main()
    except SystemExit as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
    os._exit(1)
while children:
    pid, status = os.wait()
    children.remove(pid)
    if os.WEXITSTATUS(status) and FAULT == "exit":
        sys.exit(3)
