"""Federated LoRA of large language models on one GPU: fedfm against a plain TRL loop and code as FlowerTune has it.

    python benchmarks/gpu_round.py
    python benchmarks/gpu_round.py --only 8B --out docs/results/gpu.md
    python benchmarks/gpu_round.py --quick --device cpu           a tiny model: does it run

All train the same clients by FedAvg: LoRA of rank 16 on all linear maps, AdamW, gradient checkpointing, bfloat16. The
models have the shapes of Llama 3.2 1B and Llama 3.1 8B, made from their configuration; the texts are random words, all
of one length, and tokenised before the clock starts. The 8 B model trains in 4 bits as docs/how-to/large-models.md has
it, and its peak stands beside the table there.

- TRL: the model is loaded once; for each client of a round the mean goes into the adapter, TRL's SFTTrainer trains an
  epoch, and the adapter comes out.
- FlowerTune: what a client of Flower's FlowerTune templates does with a message: load the model with
  ``from_pretrained``, wrap it, take the mean, train with SFTTrainer, give the adapter back. Both in this process,
  without Flower's messages, which is in its favour.

Each side runs in a fresh process. A round is from its first client to the mean; the first one and fedfm's last one,
which judges, do not count. The peak is what torch allocated at most.
"""

from __future__ import annotations

import datetime
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
from gpu_page import page
from large_model_memory import EIGHT_B, plan

SIDES = ("fedfm", "TRL loop", "FlowerTune")
BASES = {"bfloat16": {}, "nf4": {"quantization": "nf4"}}
ONE_B = {  # the shape of Llama 3.2 1B
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 256,
}


@dataclass(frozen=True)
class Case:
    """A model, its rows and who trains it."""

    shape: dict[str, Any]
    bases: tuple[str, ...]
    sides: tuple[str, ...]
    clients: int
    rows: int  # a client
    length: int  # tokens of a row
    batch: int
    micro: int  # rows at once
    rounds: int  # the first one does not count


CASES = {
    "1B": Case(ONE_B, ("bfloat16", "nf4"), SIDES, clients=2, rows=64, length=512, batch=8, micro=8, rounds=3),
    "8B": Case(EIGHT_B, ("nf4",), SIDES[:2], clients=1, rows=32, length=1024, batch=16, micro=2, rounds=2),
    "small": Case(SMALL, ("bfloat16", "nf4"), SIDES, clients=2, rows=8, length=32, batch=4, micro=2, rounds=2),
}
WORDS = [f"w{i}" for i in range(500)]
RANK, RATE = 16, 2e-4
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_inputs(folder: Path, case: Case, device: str) -> None:
    """Write the model in bfloat16, its tokenizer and the rows."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "eos_token": "[END]", "bos_token": "[BEGIN]"}
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*special.values(), *WORDS])}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[BEGIN] $A [END]", special_tokens=[("[BEGIN]", 3), ("[END]", 2)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=case.length, **special)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**case.shape, **ids))
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    draw, words = random.Random(0), case.length - 2  # begin and end
    with open(folder / "rows.jsonl", "w") as file:
        for i in range(case.clients * case.rows + case.batch):
            split = "train" if i < case.clients * case.rows else "test"
            row = {"text": " ".join(draw.choices(WORDS, k=words)), "client": f"c{i % case.clients}", "split": split}
            file.write(json.dumps(row) + "\n")


# --- fedfm ------------------------------------------------------------------------------------------------------------


def tables(folder: Path, base: str, case: Case, device: str) -> dict[str, Any]:
    """The experiment."""
    local = {"name": "adamw", "learning_rate": RATE, "epochs": 1, "batch_size": case.batch}
    return {
        "data": {"path": str(folder / "rows.jsonl"), "partition": {"name": "by_column", "column": "client"}},
        "model": {
            "name": str(folder / "model"),
            "task": "language_modelling",
            "device": device,
            "dtype": "bfloat16",
            "gradient_checkpointing": True,
            "max_length": case.length,
            "adaptation": {"name": "lora", "rank": RANK, "alpha": 2 * RANK, "targets": "all-linear"},
            **BASES[base],
        },
        "method": {
            "name": "fedavg",
            "rounds": case.rounds + 1,  # the last one judges
            "local": local | ({} if case.micro == case.batch else {"micro_batch": case.micro}),
        },
        "run": {"workers": 1, "evaluate_every": 0},
    }


def ours(folder: Path, base: str, case: Case, device: str) -> dict[str, Any]:
    """Seconds of the rounds by the public API."""
    import fedfm

    stamps: list[float] = []

    class Clock(fedfm.Progress):
        def round(self, line: Any) -> None:
            stamps.append(time.perf_counter())

    out = folder / f"run-{time.time_ns()}"
    result = fedfm.run(tables(folder, base, case, device), out, progress=Clock())
    between = [stop - start for start, stop in itertools.pairwise(stamps)]
    return {
        "seconds": between[-case.rounds : -1],
        "loss": result["loss"],
        "sent": result["bytes_up"] / (case.rounds + 1),
    }


# --- by hand ----------------------------------------------------------------------------------------------------------


def by_hand(folder: Path, base: str, case: Case, device: str, *, keep: bool) -> dict[str, Any]:
    """Seconds of the rounds of FedAvg with TRL's trainer.

    Args:
        keep: one model for all rounds; otherwise each message loads it.
    """
    import torch
    from datasets import Dataset
    from peft import (
        LoraConfig,
        get_peft_model,
        get_peft_model_state_dict,
        prepare_model_for_kbit_training,
        set_peft_model_state_dict,
    )
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    lines = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    parts = [
        Dataset.from_list(
            [
                {"input_ids": tokenizer(line["text"])["input_ids"]}
                for line in lines
                if line["split"] == "train" and line["client"] == f"c{k}"
            ]
        )
        for k in range(case.clients)
    ]

    def model() -> Any:
        bits = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
        quantised = {"quantization_config": bits} if base == "nf4" else {}
        net = AutoModelForCausalLM.from_pretrained(
            folder / "model", dtype=torch.bfloat16, device_map={"": device}, **quantised
        )
        if quantised:
            net = prepare_model_for_kbit_training(net, use_gradient_checkpointing=True)
        return get_peft_model(
            net, LoraConfig(r=RANK, target_modules=LINEAR, lora_alpha=2 * RANK, task_type="CAUSAL_LM")
        )

    def train(net: Any, k: int, round_: int) -> dict[str, Any]:
        settings = SFTConfig(
            str(folder / "trainer"),
            per_device_train_batch_size=case.micro,
            gradient_accumulation_steps=case.batch // case.micro,
            num_train_epochs=1,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=0.0,  # 0: no clipping, as fedfm without the key
            optim="adamw_torch",
            max_length=case.length,
            gradient_checkpointing=True,
            bf16=device != "cpu",
            use_cpu=device == "cpu",
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=round_,
        )
        SFTTrainer(net, settings, train_dataset=parts[k], processing_class=tokenizer).train()
        return {name: tensor.detach().clone() for name, tensor in get_peft_model_state_dict(net).items()}

    kept, mean, seconds = model() if keep else None, None, []
    for t in range(case.rounds):
        start, answers = time.perf_counter(), []
        for k in range(case.clients):
            net = kept if kept is not None else model()
            if mean is not None:
                set_peft_model_state_dict(net, mean)
            answers.append(train(net, k, t))
            del net
        mean = {name: torch.stack([a[name] for a in answers]).mean(0) for name in answers[0]}
        next(iter(mean.values())).sum().item()  # waits for the GPU
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds[1:]}


# --- side by side -----------------------------------------------------------------------------------------------------


def one(side: str, base: str, folder: Path, case: Case, device: str) -> dict[str, Any]:
    """One side in this process: seconds of the warm rounds, and the peak of the GPU's memory in GB."""
    import torch

    warnings.simplefilter("ignore")
    if side == "fedfm":
        found = ours(folder, base, case, device)
    else:
        found = by_hand(folder, base, case, device, keep=side == "TRL loop")
    gb = torch.cuda.max_memory_allocated() / 1e9 if device != "cpu" else common.peak_mib() * 2**20 / 1e9
    return found | {"gb": gb}


def planned_gigabytes(case: Case, base: str) -> float:
    """GB at the peak as docs/how-to/large-models.md computes them."""
    from transformers import LlamaConfig

    from fedfm.models.spec import AdaptationSpec

    spec = AdaptationSpec("lora", rank=RANK, targets=("all-linear",))
    quantization = BASES[base].get("quantization", "none")
    found = plan(
        LlamaConfig(**case.shape),
        spec,
        quantization=quantization,
        dtype="bfloat16",
        rows=case.micro,
        length=case.length,
    )
    return sum(found.values()) / 1e9


def main() -> None:
    options = common.arguments(
        __doc__,
        one={"nargs": 4, "metavar": ("CASE", "SIDE", "BASE", "FOLDER"), "help": "one side in this process"},
        only={"nargs": "+", "choices": list(CASES), "default": ["1B", "8B"]},
        without_flowertune={"action": "store_true", "help": "fedfm and the TRL loop alone"},
        bases={"nargs": "+", "choices": list(BASES), "default": list(BASES)},
        device={"default": "cuda"},
        out={"type": Path, "help": "docs/results/gpu.md: the page, and its JSON beside it; the suite's part stays"},
    )
    if options.one:
        name, side, base, folder = options.one
        print(json.dumps(one(side, base, Path(folder), CASES[name], options.device)))
        return
    if options.device != "cpu" and (why := common.no_gpu()):
        common.skip(why)
    tables, goals = [], []
    for name in ["small"] if options.quick else options.only:
        case, rows = CASES[name], []
        with tempfile.TemporaryDirectory(prefix="fedfm-bench-") as folder:
            write_inputs(Path(folder), case, options.device)
            for base in (base for base in case.bases if base in options.bases):
                sides = [side for side in case.sides if side != "FlowerTune" or not options.without_flowertune]
                found = {side: measure_side(name, side, base, folder, options.device) for side in sides}
                rows += [{"base": base, "side": side, **table_row(f)} for side, f in found.items()]
                goals += goals_for(f"{name}, {base}", found["fedfm"], found["TRL loop"], planned_gigabytes(case, base))
        title = (
            f"{name}: {case.clients} clients of {case.rows} rows of {case.length} tokens a round, batch {case.batch}, "
            f"{case.micro} rows at once"
        )
        tables.append({"title": title, "rows": rows})
        if options.out is not None:
            keep(options.out, name, rows, {base: planned_gigabytes(case, base) for base in case.bases})
    common.emit("Federated LoRA of large language models on one GPU", tables, goals)


def keep(out: Path, name: str, rows: list[dict[str, Any]], gb: dict[str, float]) -> None:
    """Put one case into the page's JSON, and write the page from it."""
    store = out.with_suffix(".json")
    kept = json.loads(store.read_text()) if store.exists() else {}
    command = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    kept[name] = {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "machine": common.machine(),
        "versions": common.versions(),
        "planned, GB": {base: round(value, 2) for base, value in gb.items()},
        "rows": rows,
    }
    store.write_text(json.dumps(kept, indent=1) + "\n")
    out.write_text(page(kept))


def measure_side(name: str, side: str, base: str, folder: str, device: str) -> dict[str, Any]:
    """One side in a process of its own."""
    return common.child(__file__, "--one", name, side, base, folder, "--device", device, limit=1200)


def goals_for(of: str, ours: dict[str, Any], loop: dict[str, Any], computed: float) -> list[dict[str, Any]]:
    """Goals: not slower and not larger than the loop by more than a tenth, nor larger than what is computed before."""
    seconds = statistics.median(ours["seconds"]) / statistics.median(loop["seconds"])
    return [
        common.goal(f"seconds a round, {of}, times the TRL loop", seconds, most=1.1),
        common.goal(f"peak of memory, {of}, times the TRL loop", ours["gb"] / loop["gb"], most=1.1),
        common.goal(f"peak of memory, {of}, times what is computed before", ours["gb"] / computed, most=1.1),
    ]


def table_row(found: dict[str, Any]) -> dict[str, Any]:
    """The figures of one side, as a row of the table."""
    seconds = {
        "median": statistics.median(found["seconds"]),
        "min": min(found["seconds"]),
        "max": max(found["seconds"]),
    }
    return {
        "seconds a round": {name: round(value, 2) for name, value in seconds.items()},
        "peak, GB": round(found["gb"], 2),
    }


if __name__ == "__main__":
    main()
