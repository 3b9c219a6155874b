"""Memory of the processes that share a model's weights, while they read them and after it, on CPUs.

    python benchmarks/shared_weights.py                 a LLaMA of 0.4 GB with 1, 2 and 4 processes
    python benchmarks/shared_weights.py --processes 2 3 --layers 12
    python benchmarks/shared_weights.py --commands      fedfm predict and fedfm export of a run of this model

The model has random weights and is made in a temporary folder. Memory is that of the process without mapped files,
after a weight was read, above what it was before the model was built.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import fedfm
from fedfm.models.quiet import quiet
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.training.sharded.group_model import load_group_model, running
from fedfm.training.sharded.settings import GroupSettings


def save_llama(folder: Path, layers: int) -> Path:
    """A LLaMA with random weights, and a tokenizer of a few words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    shape = {"vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8}
    with quiet():
        LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=layers)).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


def measure(folder: Path, processes: int) -> tuple[int, int]:
    """(bytes of weights, bytes by which memory grew), the largest of all processes."""
    spec = ModelSpec(str(folder), task="language_modelling", device="cpu", adaptation=AdaptationSpec("lora"))
    model = load_group_model(spec, GroupSettings(processes, device="cpu"), classes=(), kind="text")
    with running(model):
        held = model.ranks_hold
    return max(rank["bytes"] for rank in held), max(rank["grown"] for rank in held)


def export_from_memory(run: Path, rows: Path, out: str) -> None:
    """Export a model whose weights this process has loaded."""
    from fedfm.api import predict
    from fedfm.models.export import export

    _, model, w = predict.load(run, processes=1)
    export(model, w, "hf", out)


COMMANDS = {  # what the command's own process does
    "predict, 1 process": lambda run, rows, out: fedfm.predict(run, rows, processes=1),
    "predict, 2 processes": lambda run, rows, out: fedfm.predict(run, rows, processes=2),
    "export --to peft": lambda run, rows, out: fedfm.export(run, "peft", out),
    "export --to hf": lambda run, rows, out: fedfm.export(run, "hf", out),
    "export --to torch": lambda run, rows, out: fedfm.export(run, "torch", out),
    "export --to hf, model in memory": export_from_memory,
}


def run_commands(folder: Path, layers: int) -> None:
    """Print by how much the memory of each command's own process grows."""
    rows = folder / "rows.jsonl"
    rows.write_text("".join(f"{json.dumps({'text': 'a b c d ' * 8})}\n" for _ in range(8)))
    tables = {
        "data": {"path": str(rows), "partition": {"name": "iid", "clients": 1}},
        "model": {"name": str(save_llama(folder / "llama", layers)), "task": "language_modelling", "max_length": 16},
        "method": {"name": "fedavg", "rounds": 1},
        "run": {"processes_per_client": 2, "workers": 1},
    }
    tables["model"] |= {"device": "cpu", "dtype": "bfloat16", "adaptation": {"name": "lora", "rank": 4}}
    fedfm.run(tables, folder / "run", progress=fedfm.Progress())
    print("| command | its own process grew by at most, MB |")
    print("|---|---|")
    for number, name in enumerate(COMMANDS):
        given = [sys.executable, "-W", "ignore", __file__, "--one", name, str(folder), str(folder / f"out-{number}")]
        done = subprocess.run(given, capture_output=True, text=True, check=True)
        print(f"| {name} | {int(done.stdout.splitlines()[-1]) / 1e6:.1f} |")


def run_one(name: str, folder: Path, out: str) -> None:
    """Run one of :data:`COMMANDS`, and print by how many bytes this process grew, without the libraries here."""
    import peft  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    before, most, ended = memory(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.is_set():
            most = max(most, memory())
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    COMMANDS[name](folder / "run", folder / "rows.jsonl", out)
    ended.set()
    thread.join()
    print(most - before)


def memory() -> int:
    """Bytes of this process without mapped files."""
    resident, shared = (int(pages) for pages in Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--commands", action="store_true", help="measure fedfm predict and fedfm export")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        run_one(args.one[0], Path(args.one[1]), args.one[2])
        return
    if args.commands:
        with tempfile.TemporaryDirectory() as folder:
            run_commands(Path(folder), args.layers)
        return
    print("| processes | weights of one process, MB | its memory grew by at most, MB |")
    print("|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        path = save_llama(Path(folder), args.layers)
        for processes in args.processes:
            held, grown = measure(path, processes)
            print(f"| {processes} | {held / 1e6:.1f} | {grown / 1e6:.1f} |")


if __name__ == "__main__":
    main()
