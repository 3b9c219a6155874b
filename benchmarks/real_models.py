"""A LLaMA of 0.3 billion parameters in fedfm, and in plain PyTorch and PEFT loops.

    python benchmarks/real_models.py
    python benchmarks/real_models.py --only full --turns 3
    python benchmarks/real_models.py --device cuda       more and longer rows, seconds and memory of the GPU

Each figure is of a whole job in a fresh process on one thread: read model and texts, train, judge the test rows, save.
The model is made from its configuration, so nothing is downloaded; the texts are random words. CPU seconds are of the
job without the imports of the libraries; the peak is ru_maxrss and includes them. On a GPU they are seconds on the
wall, after a first use of the GPU, and the peak is what torch allocated at most.

- lora, full: one client, one epoch of AdamW; the plain loop is PEFT's, or the model's own.
- evaluation: the start model's perplexity on the rows, in batches of the same size.
- fedbip: two clients, two rounds of LoRA; the plain loop trains two adapters and averages them.
- fedpft: features of a classifier's rows, a mixture a class, a head; the plain loop stops after a head on the features.
"""

from __future__ import annotations

import csv
import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common

CASES = ("lora", "full", "evaluation", "fedbip", "fedpft")
SIDES = ("plain", "fedfm")
WORDS = [f"w{i}" for i in range(500)]
WHOLE = {"hidden": 1024, "layers": 19, "inner": 2816, "vocabulary": 32_000}
SIZES = {  # sizes of the model, and of the data
    "cpu": WHOLE | {"length": 128, "rows": 24, "batch": 8},
    "cuda": WHOLE | {"length": 512, "rows": 256, "batch": 16},
    "quick": {"hidden": 256, "layers": 4, "inner": 704, "vocabulary": 4_000, "length": 64, "rows": 48, "batch": 8},
}
JUDGED = 16  # rows of a batch without gradients in the plain loops
CLASSES = 4
RANK, RATE = 8, 1e-4
GOALS = {  # case -> times the plain loop's CPU seconds and peak, at most
    "lora": (1.1, None),
    "full": (None, 1.2),
    "fedpft": (1.1, 1.1),
}


def write_inputs(folder: Path, size: dict[str, Any], device: str) -> None:
    """Write model, tokenizer and rows."""
    import random

    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    draw = random.Random(0)
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "eos_token": "[END]", "bos_token": "[BEGIN]"}
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*special.values(), *WORDS])}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=size["length"], **special)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size["vocabulary"],
        hidden_size=size["hidden"],
        intermediate_size=size["inner"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["hidden"] // 64,
        num_key_value_heads=size["hidden"] // 64,
        max_position_embeddings=size["length"],
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    (folder / "size.json").write_text(json.dumps(size | {"parameters": model.num_parameters(), "device": device}))
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    with open(folder / "rows.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label", "split"])
        for i in range(2 * size["rows"]):
            text = " ".join(draw.choices(WORDS, k=size["length"] - 2))
            writer.writerow([text, f"class-{i % CLASSES}", "train" if i < size["rows"] else "test"])


# --- fedfm ------------------------------------------------------------------------------------------------------------


def ours(case: str, folder: Path, size: dict[str, Any]) -> None:
    """The case as an experiment, by the public API."""
    import fedfm

    local = {"name": "adamw", "learning_rate": RATE, "batch_size": size["batch"]}
    methods: dict[str, dict[str, Any]] = {
        "lora": {"name": "fedavg", "rounds": 1, "local": local},
        "full": {"name": "fedavg", "rounds": 1, "local": local},
        "evaluation": {"name": "fedavg", "rounds": 0},
        "fedbip": {"name": "fedbip", "rounds": 2, "local": local},
        "fedpft": {"name": "fedpft"},
    }
    model = {"name": str(folder / "model"), "max_length": size["length"], "device": size["device"]}
    if case == "fedpft":
        model |= {"adaptation": {"name": "head"}}
    else:
        adaptation = {"name": "full"} if case == "full" else {"name": "lora", "rank": RANK, "alpha": RANK}
        model |= {"task": "language_modelling", "adaptation": adaptation}
    fedfm.run(
        {
            "data": {
                "path": str(folder / "rows.csv"),
                "partition": {"name": "iid", "clients": 2 if case == "fedbip" else 1},
            },
            "model": model,
            "method": methods[case],
            "run": {"workers": 1, "evaluate_every": 0},
        },
        folder / f"run-{time.time_ns()}",
    )


# --- the plain loops --------------------------------------------------------------------------------------------------


def theirs(case: str, folder: Path, size: dict[str, Any]) -> None:
    """The case as one would write it for a single data set."""
    import torch
    from safetensors.torch import save_file
    from torch import nn
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    with open(folder / "rows.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    parts = {name: [line for line in lines if line["split"] == name] for name in ("train", "test")}

    def batches(rows: list[dict[str, str]], count: int) -> Iterator[dict[str, torch.Tensor]]:
        for at in range(0, len(rows), count):
            texts = [row["text"] for row in rows[at : at + count]]
            encoding = tokenizer(texts, truncation=True, max_length=size["length"], padding=True, return_tensors="pt")
            yield {name: encoding[name].to(size["device"]) for name in ("input_ids", "attention_mask")}

    def judge(model: Any, rows: list[dict[str, str]]) -> None:
        model.eval()
        with torch.no_grad():
            for batch in batches(rows, JUDGED):
                model(**batch, labels=batch["input_ids"], use_cache=False)

    def train(model: Any, rows: list[dict[str, str]], rounds: int) -> None:
        model.train()
        for _ in range(rounds):
            optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE, weight_decay=0.0)
            for batch in batches(rows, size["batch"]):
                model(**batch, labels=batch["input_ids"], use_cache=False).loss.backward()
                optimiser.step()
                optimiser.zero_grad()

    if case == "fedpft":
        model = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=CLASSES).eval()
        model.to(size["device"])
        found: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for name, rows in parts.items():
                states = [model.model(**b, use_cache=False).last_hidden_state[:, -1] for b in batches(rows, 32)]
                found[name] = torch.cat(states)
        head = nn.Linear(size["hidden"], CLASSES, device=size["device"])
        labels = torch.tensor([int(row["label"][-1]) for row in parts["train"]], device=size["device"])
        search = torch.optim.LBFGS(head.parameters(), max_iter=50)

        def loss() -> torch.Tensor:
            search.zero_grad()
            value = nn.functional.cross_entropy(head(found["train"]), labels)
            value.backward()  # type: ignore[no-untyped-call]
            return value

        search.step(loss)  # type: ignore[no-untyped-call]
        head(found["test"]).argmax(-1)
        save_file(head.state_dict(), folder / "head.safetensors")
        return
    model = AutoModelForCausalLM.from_pretrained(folder / "model").to(size["device"])
    if case in ("lora", "fedbip", "evaluation"):
        from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

        model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=RANK, task_type="CAUSAL_LM"))
    if case == "fedbip":
        half, start = len(parts["train"]) // 2, get_peft_model_state_dict(model)
        adapters = [{name: tensor.clone() for name, tensor in start.items()} for _ in range(2)]
        for _ in range(2):
            for k, rows in enumerate((parts["train"][:half], parts["train"][half:])):
                set_peft_model_state_dict(model, adapters[k])
                train(model, rows, 1)
                adapters[k] = {name: tensor.clone() for name, tensor in get_peft_model_state_dict(model).items()}
            middle = {name: (adapters[0][name] + adapters[1][name]) / 2 for name in start}
        for adapter in (*adapters, middle):
            set_peft_model_state_dict(model, adapter)
            judge(model, parts["test"])
    else:
        if case != "evaluation":
            train(model, parts["train"], 1)
        judge(model, parts["test"])
    model.save_pretrained(folder / f"plain-{case}")


# --- side by side -----------------------------------------------------------------------------------------------------


def one(case: str, side: str, folder: Path) -> dict[str, Any]:
    """Seconds and peak of one job in this process."""
    import torch
    import transformers  # noqa: F401 - outside of the clock

    os.environ["FEDFM_CACHE"] = str(folder / f"cache-{time.time_ns()}")  # features of an earlier job would be free
    import fedfm  # noqa: F401

    size, job = json.loads((folder / "size.json").read_text()), ours if side == "fedfm" else theirs
    if size["device"] == "cpu":
        torch.set_num_threads(1)
        began = time.process_time()
        job(case, folder, size)
        return {"seconds": time.process_time() - began, "mib": common.peak_mib()}
    torch.ones(1, device="cuda").sum().item()  # opens the GPU
    began = time.perf_counter()
    job(case, folder, size)
    torch.cuda.synchronize()
    return {"seconds": time.perf_counter() - began, "mib": torch.cuda.max_memory_allocated() / 2**20}


def main() -> None:
    options = common.arguments(
        __doc__,
        one={"nargs": 3, "metavar": ("CASE", "SIDE", "FOLDER"), "help": "one job in this process"},
        only={"nargs": "+", "choices": CASES, "default": CASES},
        turns={"type": int, "default": 2},
        device={"choices": ("cpu", "cuda"), "default": "cpu"},
    )
    if options.one:
        case, side, folder = options.one
        print(json.dumps(one(case, side, Path(folder))))
        return
    if options.device == "cuda" and (why := common.no_gpu()):
        common.skip(why)
    folder, turns, rows, goals = common.scratch(), 1 if options.quick else options.turns, [], []
    write_inputs(folder, SIZES["quick" if options.quick else options.device], options.device)
    clock = "CPU s" if options.device == "cpu" else "s"
    for case in options.only:
        found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        for _ in range(turns):
            for side in SIDES:
                found[side].append(common.child(__file__, "--one", case, side, str(folder), limit=3600))
        row: dict[str, Any] = {"case": case}
        for key, name in (("seconds", clock), ("mib", "peak, MiB")):
            plain, fedfm = (statistics.median(x[key] for x in found[side]) for side in SIDES)
            ratios = [b[key] / a[key] for a, b in zip(found["plain"], found["fedfm"], strict=True)]
            spread = {"median": round(fedfm / plain, 2), "min": round(min(ratios), 2), "max": round(max(ratios), 2)}
            row |= {f"{name}, plain": round(plain, 1), f"{name}, fedfm": round(fedfm, 1), f"{name}, ratio": spread}
            most = GOALS.get(case, (None, None))[key == "mib"]
            if most is not None:
                goals.append(common.goal(f"{name} of {case}, times the plain loop", fedfm / plain, most=most))
        rows.append(row)
    size = json.loads((folder / "size.json").read_text())
    title = f"Whole jobs with {size['parameters'] / 1e6:.0f} million parameters, {size['rows']} training rows"
    where = "" if options.device == "cpu" else " on a GPU"
    common.emit(f"Real models compared with plain loops{where}", [{"title": title, "rows": rows}], goals)


if __name__ == "__main__":
    main()
