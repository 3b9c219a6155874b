r"""A student of texts: auxiliary sentences, linear probes of teacher and student, and one encrypted batch.

    python reproduce/blindfed/text_student.py pooling .data/minilm ../shared/data/text/banking77.jsonl.gz
    python reproduce/blindfed/text_student.py sentences ../shared/data/text .data/sentences.jsonl
    fedfm distil reproduce/blindfed/prepare/minilm.toml --out .data/minilm_fhe
    python reproduce/blindfed/text_student.py probe .data/minilm .data/minilm_fhe ../shared/data/text/banking77.jsonl.gz
    python reproduce/blindfed/text_student.py encrypt .data/minilm_fhe ../shared/data/text/banking77.jsonl.gz
    python reproduce/blindfed/text_student.py federated .data/minilm_fhe ../shared/data/text/banking77.jsonl.gz OUT

``.data/minilm`` is a BERT. The probe is scikit-learn's StandardScaler and LogisticRegression(C = 0.05): of
the teacher on the mean of its last states over the tokens, computed by transformers alone, of the student on what the
protocol discloses of its last block. Both get the same rows. The difference has a 95 % interval of paired bootstrap. An
encrypted batch takes as many test rows as a ciphertext holds, on one core, and is compared with the module in float64.
``federated`` is two runs of BlindFed with two clients on the same rows, in the clear and on ciphertexts, on one core.
Training rows for which the student in the clear has no numbers are left out first, since they would spoil their batch.
``pooling`` needs no student: it compares the teacher's mean over
the tokens with its mean over 32 places, where copies count again. All print Markdown tables.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import page
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

import fedfm
from fedfm.encrypted.blindfed import BlindFed
from fedfm.encrypted.ckks.refresh import DistanceLedger
from fedfm.encrypted.inference.cost_estimate import plan
from fedfm.encrypted.inference.model_owner import KeyHolder, ModelOwner
from fedfm.encrypted.student import conversion
from fedfm.encrypted.student.folding import fold
from fedfm.encrypted.student.text_places import embed, embedding_tables
from fedfm.models import derived_modules
from fedfm.models.adapters.side_texts import base_of, normalised_states, text_places
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec

AT_ONCE = 64
LONGEST = 40  # words of an auxiliary sentence
PER_SOURCE = 20_000
PLACES = 32
DRAWS = 2000  # of the bootstrap


def sentences(source: Path, out: Path, count: int) -> None:
    """Write sentences of AG News, WikiText-2 and the Penn Treebank; a third of them are fragments of 1 to 12 words."""
    rng, found = random.Random(0), list[tuple[str, str]]()
    for name in ("agnews_7600.jsonl.gz", "wikitext2.train.txt.gz", "ptb.train.txt.gz"):
        with gzip.open(source / name, "rt") as file:
            lines = [json.loads(line)["text"] if ".jsonl" in name else line.strip() for line in file]
        parts = [s for line in lines if not line.startswith("=") for s in re.split(r"(?<=[.!?]) +", line)]
        clean = [s.replace(" @-@ ", "-").replace("<unk>", "thing").strip() for s in parts]
        kept = [s for s in clean if 2 <= len(s.split()) <= LONGEST]
        found += [(s, name.partition(".")[0]) for s in rng.sample(kept, min(len(kept), PER_SOURCE))]
    rng.shuffle(found)
    with out.open("w") as file:
        for i, (text, label) in enumerate(found[:count]):
            words = text.split()
            if i % 3 == 0:
                n = rng.randint(1, min(12, len(words)))
                start = rng.randint(0, len(words) - n)
                words = words[start : start + n]
            line = {"text": " ".join(words), "label": label, "split": "test" if i % 12 == 0 else "train"}
            file.write(json.dumps(line) + "\n")


def rows_of(path: Path, train: int, test: int) -> dict[str, list[dict[str, Any]]]:
    """The first rows of each class, as many in each."""
    with gzip.open(path, "rt") as file:
        rows = [json.loads(line) for line in file]
    found = {}
    for split, most in (("train", train), ("test", test)):
        part = [row for row in rows if row["split"] == split]
        seen, kept = dict[Any, int](), []
        for row in part:
            seen[row["label"]] = seen.get(row["label"], 0) + 1
            if seen[row["label"]] <= most:
                kept.append(row)
        found[split] = kept
    return found


def teacher_features(name: str, texts: list[str], places: int = 0) -> np.ndarray:
    """Means of the last states over the tokens, (n, d), or over so many places, which copies of the tokens fill."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(name), AutoModel.from_pretrained(name).eval()
    longest = min(places or 128, model.config.max_position_embeddings)
    ids = tokenizer(texts, truncation=True, max_length=longest)["input_ids"]
    order = np.argsort([len(row) for row in ids])
    out = np.zeros((len(ids), model.config.hidden_size), np.float32)
    with torch.no_grad():
        for part in np.split(order, range(AT_ONCE, len(order), AT_ONCE)):
            batch = tokenizer.pad({"input_ids": [ids[i] for i in part]}, return_tensors="pt")
            lengths = batch["attention_mask"].sum(1, keepdim=True)
            place = torch.arange(int(lengths.max()))
            copies = places // lengths + (place < places % lengths) if places else torch.ones(1)
            weight = (copies * batch["attention_mask"])[..., None].float()
            states = model(**batch).last_hidden_state
            out[part] = ((states * weight).sum(1) / weight.sum(1)).numpy()
    return out


def tokens_of(model: Any, texts: list[str]) -> tuple[Tensor, Tensor]:
    """Token ids (n, T) and lengths (n,)."""
    places = text_places(model.module)
    found = model.tools.tokenizer(texts, padding="max_length", truncation=True, max_length=places, return_tensors="pt")
    return found["input_ids"], found["attention_mask"].sum(1)


def states_of(module: Any, ids: Tensor, lengths: Tensor) -> list[Tensor]:
    """Normalised states of the embedding and of all blocks in the clear, each (n, T, d)."""
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    with torch.no_grad():
        found = base_of(module)(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states
        return normalised_states(module, list(found))


def student_of(name: str) -> Any:
    """The student in the clear."""
    return load_model(ModelSpec(name, adaptation=AdaptationSpec("head")), classes=("a", "b"), kind="text")


def probe(a: argparse.Namespace) -> None:
    """One row of the table."""
    rows = rows_of(a.data, a.train, a.test)
    texts = [row["text"] for part in ("train", "test") for row in rows[part]]
    y = {part: np.array([row["label"] for row in rows[part]]) for part in rows}
    n = len(y["train"])
    model = student_of(a.student)
    conversion.forget(model.module)
    ids, lengths = tokens_of(model, texts)
    mine = np.concatenate(
        [
            states_of(model.module, i, k)[-1].mean(1).numpy()
            for i, k in zip(ids.split(AT_ONCE), lengths.split(AT_ONCE), strict=True)
        ]
    )
    counts = derived_modules.violations(model.module).values()
    long = sum(len(x) > text_places(model.module) for x in model.tools.tokenizer(texts)["input_ids"])
    finite = np.isfinite(mine).all(1)
    known, mine = teacher_features(a.teacher, texts), np.where(finite[:, None], mine, 0)
    right, shown = compare({"teacher": known, "student": mine}, y)
    line = {
        "set": a.data.name.partition(".")[0],
        "train rows": n,
        "test rows": len(y["test"]),
        "classes": len(set(y["train"].tolist())),
        **right,
        "points below, 95 %": shown,
        "rows cut": long,
        "rows without numbers": int((~finite).sum()),
        "outside, of a million": 1e6 * sum(k for k, _ in counts) / sum(k for _, k in counts),
    }
    print(page.table([line]), flush=True)


def compare(features: dict[str, np.ndarray], y: dict[str, np.ndarray]) -> tuple[dict[str, str], str]:
    """Accuracies of probes on two kinds of features of the same rows, and by how many points the second is below."""
    n, right = len(y["train"]), {}
    for who, x in features.items():
        fitted = make_pipeline(StandardScaler(), LogisticRegression(C=0.05, max_iter=2000)).fit(x[:n], y["train"])
        right[who] = (fitted.predict(x[n:]) == y["test"]).astype(float)
    first, second = right.values()
    below, rng = 100 * (first - second), np.random.default_rng(0)
    draws = [below[rng.integers(0, len(below), len(below))].mean() for _ in range(DRAWS)]
    low, high = np.quantile(draws, [0.025, 0.975])
    return {f"{who}, %": f"{100 * x.mean():.1f}" for who, x in right.items()}, (
        f"{below.mean():.1f} ({low:.1f} to {high:.1f})"
    )


def pooling(a: argparse.Namespace) -> None:
    """What it costs that copies count again, without any polynomial."""
    rows = rows_of(a.data, a.train, a.test)
    texts = [row["text"] for part in ("train", "test") for row in rows[part]]
    y = {part: np.array([row["label"] for row in rows[part]]) for part in rows}
    means = {"tokens": teacher_features(a.teacher, texts), "places": teacher_features(a.teacher, texts, PLACES)}
    right, shown = compare(means, y)
    line = {"train rows": len(y["train"]), "test rows": len(y["test"]), **right, "points below, 95 %": shown}
    print(page.table([line]), flush=True)


def encrypt(a: argparse.Namespace) -> None:
    """One batch, block by block."""
    model = student_of(a.student)
    folded = fold(model.module)
    folded = replace(folded, blocks=folded.blocks[: a.blocks])
    holder = KeyHolder.new(len(folded.positions))
    rows = rows_of(a.data, 0, 2)["test"][: holder.layout.samples]
    ids, lengths = tokens_of(model, [row["text"] for row in rows])
    x = embed(ids, lengths, embedding_tables(model.module)).numpy()
    want = states_of(model.module.double(), ids, lengths)[1:]
    planned = plan(folded, [len(rows)], "class")
    print(planned.table(), flush=True)
    public, session, key, ledger = holder.public(), os.urandom(16), os.urandom(32), DistanceLedger()
    holder.begin(session, key)
    owner = ModelOwner(folded, "class", public, session, key, ledger)
    spent, crossed, began = [0.0], [0], [time.process_time()]
    lines: list[dict[str, Any]] = []

    def exchange(message: bytes) -> bytes:
        begin = time.process_time()
        answer = holder.refresh(message)
        spent[0] += time.process_time() - begin
        crossed[0] += len(message) + len(answer)
        return answer

    def release(block: int, message: bytes) -> None:
        got = holder.decrypt_released(message, len(rows))[:, 0]
        crossed[0] += len(message)
        clear = want[block].mean(1).numpy() / folded.scales[block]
        lines.append(
            {
                "block": block + 1,
                "owner CPU s": time.process_time() - began[0] - spent[0],
                "client CPU s": spent[0],
                "largest error": float(np.abs(got - clear).max()),
                "largest value": float(np.abs(clear).max()),
            }
        )
        print(json.dumps(lines[-1]), flush=True)
        spent[0], began[0] = 0.0, time.process_time()

    begin = time.process_time()
    message = holder.rows(x)
    crossed[0] += len(message)
    began[0] = time.process_time()
    owner.run(message, exchange, release)
    print(f"rows encrypted in {began[0] - begin:.1f} CPU s at the start; {ledger}", flush=True)
    ours, theirs = (sum(line[f"{who} CPU s"] for line in lines) for who in ("owner", "client"))
    blocks, n = len(lines), len(rows)
    found = [
        {"": "rows of the batch", "measured": n, "`fedfm check`": planned.batch},
        {"": "owner, CPU s a block", "measured": ours / blocks, "`fedfm check`": planned.seconds_per_block[0]},
        {"": "client, CPU s a block", "measured": theirs / blocks, "`fedfm check`": planned.seconds_per_block[1]},
        {"": "CPU s a row", "measured": (ours + theirs) / n, "`fedfm check`": planned.seconds / n},
        {"": "MB a row", "measured": crossed[0] / n / 1e6, "`fedfm check`": planned.bytes_per_sample / 1e6},
        {"": "refreshed ciphertexts", "measured": ledger.ciphertexts, "`fedfm check`": planned.refreshed},
        {"": "evaluation keys, MB", "measured": len(public) / 1e6, "`fedfm check`": planned.key_bytes / 1e6},
        {
            "": "statistical distance, log2",
            "measured": float(np.log2(ledger.spent)),
            "`fedfm check`": float(np.log2(planned.statistical_distance)),
        },
    ]
    print(page.table(lines), page.table(found), sep="\n\n", flush=True)


def rows_with_numbers(student: str, source: Path, count: int, target: Path) -> int:
    """Write so many rows of both parts, evenly over the classes; return how many were left out."""
    model, spare = student_of(student), 8
    conversion.forget(model.module)
    rows = rows_of(source, 1000, 1000)
    lost, kept = 0, list[dict[str, Any]]()
    for part in rows.values():
        number = dict[Any, int]()
        for row in part:
            row["number"] = number[row["label"]] = number.get(row["label"], 0) + 1
        part.sort(key=lambda row: (row.pop("number"), row["label"]))
        ids, lengths = tokens_of(model, [row["text"] for row in part[: count + spare]])
        fine = torch.cat(
            [
                states_of(model.module, i, k)[-1].isfinite().all(2).all(1)
                for i, k in zip(ids.split(AT_ONCE), lengths.split(AT_ONCE), strict=True)
            ]
        )
        lost += int((~fine[:count]).sum())
        kept += [row for row, known in zip(part, fine.tolist(), strict=False) if known][:count]
    target.write_text("".join(json.dumps(row) + "\n" for row in kept))
    return lost


def compare_federations(a: argparse.Namespace) -> None:
    """The same federation in the clear and on ciphertexts, and the plan of the second."""
    a.out.mkdir(parents=True, exist_ok=True)
    lost = rows_with_numbers(a.student, a.data, a.rows, a.out / "rows.jsonl")
    print(f"{lost} of {2 * a.rows} rows were left out, and the next ones took their places", flush=True)
    experiment: dict[str, Any] = {
        "data": {"path": str(a.out / "rows.jsonl"), "partition": {"name": "iid", "clients": 2}},
        "method": {
            "name": "blindfed",
            "foundation": a.student,
            "rounds": a.rounds,
            "processes": 1,
            "local": {"learning_rate": 0.05, "epochs": 10, "batch_size": 16},
        },
        "run": {"workers": 1},
    }
    spent = dict[str, float]()
    plain = BlindFed.run_forward_pass

    def measure(method: BlindFed, fed: Any) -> dict[str, float]:
        begin = time.process_time(), sum(os.times()[2:4]), time.monotonic()
        figures = plain(method, fed)
        spent["client"] = time.process_time() - begin[0]
        spent["owner"], spent["clock"] = sum(os.times()[2:4]) - begin[1], time.monotonic() - begin[2]
        return figures

    BlindFed.run_forward_pass = measure  # type: ignore[method-assign]
    found = {}
    for how in ("clear", "ckks"):
        experiment["method"]["encryption"] = how
        found[how] = fedfm.run(experiment, a.out / how)
        print(how, json.dumps(found[how]["details"]), json.dumps(spent), flush=True)
    manifest = json.loads((a.out / "ckks" / "manifest.json").read_text())
    counts = [sum(part["rows"] for part in parts.values()) for parts in manifest["split"]["clients"].values()]
    planned = plan(fold(student_of(a.student).module), counts, "class")
    blocks = len(fold(student_of(a.student).module).blocks)
    details, scored = found["ckks"]["details"], {how: result["accuracy"] for how, result in found.items()}
    each = [side * planned.batches * blocks for side in planned.seconds_per_block]
    lines = [
        {"": "accuracy in the clear, %", "measured": 100 * scored["clear"], "`fedfm check`": ""},
        {"": "accuracy on ciphertexts, %", "measured": 100 * scored["ckks"], "`fedfm check`": ""},
        {"": "rows, batches", "measured": f"{sum(counts)}, {planned.batches}", "`fedfm check`": ""},
        {"": "owner, CPU s", "measured": spent["owner"], "`fedfm check`": each[0]},
        {"": "clients, CPU s", "measured": spent["client"], "`fedfm check`": each[1]},
        {"": "clock, s", "measured": spent["clock"], "`fedfm check`": ""},
        {
            "": "MB a row",
            "measured": details["ciphertext_bytes"] / 1e6,
            "`fedfm check`": planned.bytes_per_sample / 1e6,
        },
        {"": "largest error", "measured": details["max_error"], "`fedfm check`": ""},
        {
            "": "statistical distance, log2",
            "measured": float(np.log2(details["statistical_distance"])),
            "`fedfm check`": float(np.log2(planned.statistical_distance)),
        },
    ]
    print(page.table(lines), flush=True)


def main() -> None:
    """One of the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    made = parts.add_parser("sentences")
    made.add_argument("source", type=Path), made.add_argument("out", type=Path)
    made.add_argument("--count", type=int, default=1320)
    probes = parts.add_parser("probe")
    probes.add_argument("teacher"), probes.add_argument("student"), probes.add_argument("data", type=Path)
    pools = parts.add_parser("pooling")
    pools.add_argument("teacher"), pools.add_argument("data", type=Path)
    for part in (probes, pools):
        part.add_argument("--train", type=int, default=10, help="rows of a class")
        part.add_argument("--test", type=int, default=13, help="rows of a class")
    batch = parts.add_parser("encrypt")
    batch.add_argument("student"), batch.add_argument("data", type=Path)
    batch.add_argument("--blocks", type=int, help="so many blocks, from the first one")
    whole = parts.add_parser("federated")
    whole.add_argument("student"), whole.add_argument("data", type=Path), whole.add_argument("out", type=Path)
    whole.add_argument("--rows", type=int, default=252, help="rows of each part")
    whole.add_argument("--rounds", type=int, default=20)
    a = parser.parse_args()
    if a.part == "sentences":
        sentences(a.source, a.out, a.count)
    else:
        {"probe": probe, "pooling": pooling, "encrypt": encrypt, "federated": compare_federations}[a.part](a)


if __name__ == "__main__":
    main()
