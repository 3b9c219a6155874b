"""Replaces torchrun or srun in tests: forks the ranks of a group, and makes one of them fail.

python forked_ranks.py COUNT FAULT FOLDER [the program that a real launcher would start]

python forked_ranks.py serve SOCKET is a server that imports the libraries of ranks once. If FORKED_RANKS names its
socket, the command above lets this server fork the ranks, which saves three seconds, and ends with their exit status.
If the command is killed, the ranks end.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path


def ask(place: str) -> None:
    """Let the server of this socket run this process's command, and exit with its status."""
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(place)
        call = json.dumps([sys.argv, os.getcwd(), dict(os.environ)]).encode()
        socket.send_fds(s, [len(call).to_bytes(4, "big")], [0, 1, 2])
        s.sendall(call)
        os._exit(s.recv(1)[0])


if "FORKED_RANKS" in os.environ and sys.argv[1] != "serve":
    ask(os.environ.pop("FORKED_RANKS"))

import peft  # noqa: E402, F401 - so that the ranks share the imports
import torch  # noqa: E402
import transformers.models.gpt2.modeling_gpt2  # noqa: E402
import transformers.models.llama.modeling_llama  # noqa: E402, F401

import fedfm.models.adapters.lora  # noqa: E402
import fedfm.models.hub  # noqa: E402
import fedfm.training.loop  # noqa: E402, F401
from fedfm.training.sharded import lockstep, rank  # noqa: E402


def once(fault: str, folder: Path) -> bool:
    """Whether this is the first occurrence of this fault."""
    marker = folder / f"{fault}.done"
    if marker.exists():
        return False
    marker.touch()
    return True


def fail(number: int, count: int, fault: str, folder: Path) -> None:
    """Prepare the fault in the last rank."""
    train = lockstep.train
    if fault == "gpus":
        rank.gpu_of = lambda local: "GPU-7"
    if number != count - 1 or fault == "none":
        return

    def failing(model, work, say):
        if fault == "memory" and work.most > 2:
            raise torch.OutOfMemoryError("of the device")
        if fault == "error":
            raise ValueError("a defect")
        if fault == "killed" and once(fault, folder):
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "killed again":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "stopped" and once(fault, folder):
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "asleep" and once(fault, folder):
            time.sleep(600)
        return train(model, work, say)

    lockstep.train = failing
    if fault == "version":
        rank.__version__ = "0.0"
    if fault == "exit":
        raise SystemExit("no licence")


def launch() -> int:
    """Fork the ranks, wait for them, and return the exit status."""
    count, fault, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    children = []
    for number in range(count):
        pid = os.fork()
        if pid:
            children.append(pid)
            continue
        local = number
        if fault == "weights" and number == count - 1:
            os.chdir(folder)
            local = 0  # as on another machine
        os.environ |= {"RANK": str(number), "WORLD_SIZE": str(count), "LOCAL_RANK": str(local)}
        try:
            fail(number, count, fault, folder)
            rank.main()
        except SystemExit as error:
            sys.stderr.write(f"{error}\n")
            sys.stderr.flush()
        os._exit(1)
    while children:
        pid, status = os.wait()
        children.remove(pid)
        if os.WEXITSTATUS(status) and fault == "exit":
            return 3
    return 0


def answer(asking: socket.socket) -> None:
    """Run one command in a fork of the server, as a process group that ends with the process that sent the command."""
    os.setsid()
    size, files, *_ = socket.recv_fds(asking, 4, 3)
    call = bytearray()
    while len(call) < int.from_bytes(size, "big"):
        call += asking.recv(1 << 16)
    for own, file in enumerate(files):
        os.dup2(file, own)
    sys.argv, folder, variables = json.loads(call)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)

    def watch() -> None:
        asking.recv(1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    asking.sendall(bytes([launch()]))
    os._exit(0)


def serve(place: str) -> None:
    """Answer calls until this process is killed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(place)
        s.listen()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            asking, _ = s.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                answer(asking)
            asking.close()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    sys.exit(launch())
