"""Memory of the processes that share a model's weights, while they read them and after it, on CPUs.

    python benchmarks/shared_weights.py                 a LLaMA of 0.4 GB with 1, 2 and 4 processes
    python benchmarks/shared_weights.py --processes 2 3 --layers 12

The model has random weights and is made in a temporary folder. Memory is that of the process without mapped files,
after a weight was read, above what it was before the model was built.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

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


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--layers", type=int, default=7)
    args = parser.parse_args()
    print("| processes | weights of one process, MB | its memory grew by at most, MB |")
    print("|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        path = save_llama(Path(folder), args.layers)
        for processes in args.processes:
            held, grown = measure(path, processes)
            print(f"| {processes} | {held / 1e6:.1f} | {grown / 1e6:.1f} |")


if __name__ == "__main__":
    main()
