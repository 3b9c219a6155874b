"""Memory of LoRA on a large language model at one client, from its configuration: without its weights, without a GPU.

    python benchmarks/large_model_memory.py                        an 8 B LLaMA, nf4, as docs/how-to/large-models.md
    python benchmarks/large_model_memory.py --config config.json --quantization none --length 2048 --rows 4
    python benchmarks/large_model_memory.py --size 70B --quantization none --processes 8    as docs/how-to/many-gpus.md

Weights, LoRA, gradients and Adam's states are counted from the shapes. What a backward pass keeps of a block is counted
by running the block on tensors without data (FakeTensorMode). It leaves out CUDA's context (about 0.5 GB), the
allocator's rounding, and the server's side.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from fedfm.core import tasks
from fedfm.models import families
from fedfm.models.adapters import adaptation
from fedfm.models.adapters.stacked import stacks
from fedfm.models.language.chunked_loss import PIECE
from fedfm.models.locate import DTYPES
from fedfm.models.quiet import quiet
from fedfm.models.spec import AdaptationSpec

EIGHT_B = {  # the shape of Llama 3.1 8B
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14_336,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
}
SEVENTY_B = EIGHT_B | {  # the shape of Llama 3.1 70B
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "intermediate_size": 28_672,
}
SIZES = {"8B": EIGHT_B, "70B": SEVENTY_B}
BLOCK, NESTED = 64, 256  # weights of one scale, and scales of one scale of theirs


def bits(count: int, outputs: int, quantization: str, itemsize: int) -> float:
    """Bytes of a linear map of ``count`` weights and ``outputs`` rows."""
    if quantization == "int8":
        return count + 4 * outputs
    if quantization != "nf4":
        return count * itemsize
    scales = -(-count // BLOCK)
    tables = 4 * (16 + 256 + 1)  # levels of the weights and of the scales, and the scales' mean
    return count / 2 + scales + 4 * -(-scales // NESTED) + tables


def skeleton(config: Any, spec: AdaptationSpec, dtype: torch.dtype) -> tuple[nn.Module, families.Parts]:
    """The adapted model without numbers, on the device ``meta``, and its parts."""
    with quiet(), torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    parts = families.find(module, config.model_type)
    spec = adaptation.with_defaults(spec)
    return adaptation.apply(module, spec, parts, new=[], task=tasks.find("language_modelling"), seed=0), parts


def move_to_fake_cpu(module: nn.Module) -> None:
    """Put it on a CPU, still without numbers; in FakeTensorMode."""
    for part in module.modules():
        for name, p in list(part.named_parameters(recurse=False)):
            there = torch.empty(p.shape, dtype=torch.float32 if p.requires_grad else p.dtype)
            setattr(part, name, nn.Parameter(there, requires_grad=p.requires_grad))
        for name, b in list(part.named_buffers(recurse=False)):
            setattr(part, name, torch.empty(b.shape, dtype=b.dtype))


def kept_by_a_block(module: Any, parts: families.Parts, shape: tuple[int, int, int], dtype: torch.dtype) -> int:
    """Bytes that autograd keeps of one block for a batch (rows, tokens, width)."""
    block, turn = parts.blocks[0][1], families.unwrap(module).model.rotary_emb
    kept: list[Tensor] = []
    half = torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32)
    with FakeTensorMode():
        for part in (block, turn):
            move_to_fake_cpu(part)
        own = {p.untyped_storage()._cdata for p in block.parameters()}
        places = torch.arange(shape[1])[None]
        x = torch.empty(shape, dtype=dtype, requires_grad=True)
        with half, torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
            out = block(x, position_embeddings=turn(x, places), position_ids=places)
        sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in kept}
        del out
    return sum(size for storage, size in sizes.items() if storage not in own)


def plan(
    config: Any, spec: AdaptationSpec, *, quantization: str, dtype: str, rows: int, length: int, processes: int = 1
) -> dict[str, float]:
    """Bytes by what they are for, at the peak of a training step with gradient checkpointing.

    Several processes each hold their part of every weight, and for a moment whole blocks.
    """
    half = DTYPES[dtype]
    module, parts = skeleton(config, spec, half)
    width = config.hidden_size
    inside = tuple(f"{path}." for path, _ in parts.blocks)
    maps, rest, lora, largest = 0.0, 0, 0, 0
    experts = {id(p) for p in stacks(module).values()} if quantization != "int8" else set()
    for name, p in module.named_parameters():
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
        if "lora_" in name:
            lora += p.numel()
        elif plain.startswith(inside) and (p.dim() == 2 or id(p) in experts):
            maps += bits(p.numel(), p.shape[0], quantization, half.itemsize)
            largest = max(largest, p.numel() * half.itemsize)
        else:
            rest += p.numel() * half.itemsize
    block = kept_by_a_block(module, parts, (rows, length, width), half)
    tokens = rows * length
    logits = min(tokens * config.vocab_size, max(PIECE, config.vocab_size))
    activations = {
        f"inputs of {len(parts.blocks)} blocks, {dtype}": len(parts.blocks) * tokens * width * half.itemsize,
        "what one block keeps while it is computed again": block,
        f"logits of {logits // config.vocab_size} tokens, {dtype} and float32, and their gradients": logits
        * (half.itemsize + 4 + 4 + 4),
    }
    if processes > 1:
        part = f"1/{processes}"
        return {
            f"linear maps of the blocks, {dtype}, {part}": maps / processes,
            f"embeddings, head and norms, {dtype}, {part}": rest / processes,
            f"LoRA, float32, {part}, twice": 8 * lora / processes,
            f"gradients of LoRA, float32, {part}, twice": 8 * lora / processes,
            f"Adam's two moments, float32, {part}": 8 * lora / processes,
            "three blocks: one computes, the next one arrives and is unpacked": 3
            * (maps + 4 * lora)
            / len(parts.blocks),
            f"embeddings, head and norms, {dtype}, whole": rest,
            **activations,
        }
    return {
        f"linear maps of the blocks, {quantization}": maps,
        f"embeddings, head and norms, {dtype}": rest,
        "LoRA, float32": 4 * lora,
        "gradients of LoRA, float32": 4 * lora,
        "Adam's two moments, float32": 8 * lora,
        f"one map in {dtype} while it multiplies": 0 if quantization == "none" else largest,
        **activations,
    }


def table(found: dict[str, float]) -> str:
    """A table in Markdown, in GB of 10^9 bytes."""
    lines = ["| at the peak of a step | GB |", "|---|---|"]
    lines += [f"| {what} | {size / 1e9:.2f} |" for what, size in found.items()]
    return "\n".join([*lines, f"| **sum** | **{sum(found.values()) / 1e9:.2f}** |"])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="8B", choices=tuple(SIZES), help="the shape of Llama 3.1 of this size")
    parser.add_argument("--config", type=Path, help="config.json of a LLaMA-like model, instead of --size")
    parser.add_argument("--processes", type=int, default=1, help="run.processes_per_client; without quantization")
    parser.add_argument("--quantization", default="nf4", choices=("nf4", "int8", "none"))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", nargs="*", default=["all-linear"])
    parser.add_argument("--rows", type=int, default=2, help="rows at once: micro_batch")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row: max_length")
    args = parser.parse_args()
    if args.processes > 1 and args.quantization != "none":
        parser.error("--processes: several processes share weights without quantization; add --quantization none")
    config = LlamaConfig(**SIZES[args.size])
    if args.config:
        config = AutoConfig.for_model(**json.loads(args.config.read_text()))
    spec = AdaptationSpec("lora", rank=args.rank, targets=tuple(args.targets))
    shape = {"rows": args.rows, "length": args.length, "processes": args.processes}
    print(table(plan(config, spec, quantization=args.quantization, dtype=args.dtype, **shape)))


if __name__ == "__main__":
    main()
