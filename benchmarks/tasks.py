"""A client's local pass for each task, against the Trainer of transformers: same model, rows, batches and optimiser.

``sequence_to_sequence`` has the Seq2SeqTrainer beside it, ``embedding`` the trainer of sentence-transformers.

    python benchmarks/tasks.py
    python benchmarks/tasks.py --only regression --turns 9

The models are made here from configurations, with random weights. Both start from the same weights and train them all
by AdamW, in float32, on one thread, without dropout. The Trainer gets the rows in fedfm's order. A first pass of both
compares the losses of all steps; then both train in turn. Memory is what one pass adds at its peak, in a child
before each turn.

A new task is one entry of ENTRIES.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import common
import numpy as np
import sentence_transformers
import torch
import transformers
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.model_card import SentenceTransformerModelCardCallback
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor, nn

from fedfm.core.client import Client, ClientData
from fedfm.core.rows import Batch, Rows
from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec
from fedfm.linalg.params import Params
from fedfm.models.language.encoding import next_tokens
from fedfm.models.load import load_model
from fedfm.models.model import Model
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.tasks import _image_arguments, _pair_vectors
from fedfm.training import AdamW
from fedfm.training.local_job import Job
from fedfm.training.scheduler import train_client

WORDS = ("red", "fish", "blue", "bird", "big", "small", "say", "colour", "animal", "tree", "wind", "stone")
SHAPE = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}
LOCAL = AdamW(epochs=2, batch_size=16)
ROWS, LONGEST = 128, 48
TEMPLATE = (
    "{% for m in messages %}{% for c in m['content'] %}{{ '<image>' if c['type'] == 'image' else c['text'] }}"
    "{% endfor %}{{ '</s>' if m['role'] == 'assistant' else ' ' }}{% endfor %}"
)
LOSS, RATIO = 1e-5, 1.05  # goals: largest difference of a loss, largest ratio of costs
MEMORY = (
    "AdamW of fedfm takes 1 MiB for its square roots, whatever the size of the model; the fused AdamW of the Trainer "
    "takes none. These models have 3 to 7 MiB of weights."
)
Row = dict[str, Any]


# --- what differs by task ---------------------------------------------------------------------------------------------
def encoder(folder: Path) -> Path:
    """A BERT."""
    shape = transformers.BertConfig(vocab_size=_tokenizer(folder), max_position_embeddings=64, **SHAPE)
    transformers.BertModel(shape).save_pretrained(folder)
    return folder


def decoder(folder: Path) -> Path:
    """A Llama."""
    special = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    shape = transformers.LlamaConfig(vocab_size=_tokenizer(folder), **SHAPE, **special)
    transformers.LlamaForCausalLM(shape).save_pretrained(folder)
    return folder


def next_labels(batch: Batch) -> Tensor:
    """Labels of a causal model of transformers, which shifts them itself."""
    targets = next_tokens(batch)
    return torch.cat([torch.full_like(targets[:, :1], -100), targets], dim=1)


def sequences(folder: Path) -> Path:
    """A T5."""
    shape = {"d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 2, "num_heads": 4}
    special = {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 3}
    transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=_tokenizer(folder), **shape, **special)
    ).save_pretrained(folder)
    return folder


def pixels_of(folder: Path, rng: np.random.Generator) -> Path:
    """Pictures of one of four colours."""
    y = rng.integers(0, 4, ROWS)
    x = rng.integers(0, 60, (ROWS, 32, 32, 3)) + 150 * np.eye(4)[y][:, None, None, :3]
    np.savez(folder / "rows.npz", x=x.astype(np.uint8), y=y)
    return folder / "rows.npz"


def vision(folder: Path) -> Path:
    """A ViT."""
    shape = transformers.ViTConfig(image_size=32, patch_size=8, **SHAPE)
    transformers.ViTModel(shape).save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def write_masks(folder: Path, rng: np.random.Generator) -> Path:
    """Noisy pictures with a bright square each, next to masks of its pixels."""
    from PIL import Image

    for name in ("images", "masks"):
        (folder / "shapes" / name).mkdir(parents=True)
    for i in range(ROWS):
        mask, (a, b) = np.zeros((64, 64), np.uint8), rng.integers(0, 40, 2)
        mask[a : a + 20, b : b + 20] = 1 + i % 2
        grey = rng.integers(0, 100, (64, 64)) + 70 * mask
        Image.fromarray(grey.astype(np.uint8)).convert("RGB").save(folder / "shapes" / "images" / f"{i}.png")
        Image.fromarray(mask).save(folder / "shapes" / "masks" / f"{i}.png")
    return folder / "shapes"


def segformer(folder: Path) -> Path:
    """A SegFormer without dropout of whole paths."""
    shape = {"hidden_sizes": [32, 64, 96, 128], "depths": [1] * 4, "num_attention_heads": [1, 2, 3, 4]}
    config = transformers.SegformerConfig(**shape, decoder_hidden_size=128, num_labels=3, drop_path_rate=0.0)
    transformers.SegformerForSemanticSegmentation(config).save_pretrained(folder)
    transformers.SegformerImageProcessor(size={"height": 64, "width": 64}).save_pretrained(folder)
    return folder


def pair(model: Any, batch: Batch) -> dict[str, Tensor]:
    """The inputs of one pair, as the trainer of sentence-transformers names them."""
    parts = zip(("anchor", "positive"), _pair_vectors._parts(model, batch), strict=True)
    return {f"{name}_{key}": part[key][0] for name, part in parts for key in ("input_ids", "attention_mask")}


def conversations(folder: Path, rng: np.random.Generator) -> Path:
    """Questions about pictures of one colour, with answers."""
    from PIL import Image

    for i in range(ROWS):
        Image.new("RGB", (32, 32), tuple(rng.integers(0, 255, 3).tolist())).save(folder / f"{i}.png")
    said = [[" ".join(rng.choice(WORDS, n)) for n in (rng.integers(4, 12), 6)] for _ in range(ROWS)]
    made = [
        {"messages": [{"role": "user", "content": f"<image>{a}"}, {"role": "assistant", "content": b}]} for a, b in said
    ]
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row | {'images': [f'{i}.png']})}\n" for i, row in enumerate(made)))
    return path


def llava(folder: Path) -> Path:
    """A LLaVA: a CLIP and a Llama."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    size = _tokenizer(folder, "<image>")
    special = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    vision = transformers.CLIPVisionConfig(image_size=32, patch_size=8, projection_dim=128, **SHAPE)
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(vocab_size=size, **SHAPE, **special),
        vision_config=vision,
        image_token_index=4,
    )
    transformers.LlavaForConditionalGeneration(config).save_pretrained(folder)
    transformers.LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}),
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Entry:
    """One task.

    Attributes:
        row: a row of the jsonl, from its words; or ``file`` writes another file.
        labels: the Trainer's labels of a batch of fedfm.
        example: an example of the Trainer instead, from the model and a batch of one row.
        trainer: what stands before ``Trainer`` and ``TrainingArguments`` in the names of the peer's classes.
        auto: the class of transformers behind ``AutoModelFor``.
        learning_rate: of AdamW.
        config: arguments of its configuration.
        model: makes the model in a folder.
        task: ``model.task``; by default the entry's name.
        keys: further keys of [model].
    """

    labels: Callable[[Batch], Tensor] = next_labels
    example: Callable[[Model, Batch], dict[str, Tensor]] | None = None
    trainer: str = ""
    learning_rate: float = 1e-3
    auto: str = "SequenceClassification"
    row: Callable[[list[str]], Row] | None = None
    file: Callable[[Path, np.random.Generator], Path] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    model: Callable[[Path], Path] = encoder
    task: str = ""
    keys: Mapping[str, Any] = field(default_factory=dict)


def tags(words: list[str]) -> list[str]:
    known = {"red": "B-COL", "blue": "B-COL", "fish": "B-ANI", "bird": "B-ANI"}
    return [known.get(word, "O") for word in words]


ENTRIES: dict[str, Entry] = {
    "classification": Entry(
        row=lambda words: {"text": " ".join(words), "label": words[0]},
        labels=lambda batch: batch["labels"],
    ),
    "classification of pictures": Entry(
        file=pixels_of,
        labels=lambda batch: batch["labels"],
        auto="ImageClassification",
        model=vision,
        task="classification",
    ),
    "multi_label": Entry(
        row=lambda words: {"text": " ".join(words), "label": sorted({*words} & {"red", "fish", "wind"})},
        labels=lambda batch: batch["targets"].float(),
        config={"problem_type": "multi_label_classification"},
    ),
    "regression": Entry(
        row=lambda words: {"text": " ".join(words), "label": words.count("red") - 0.5 * words.count("fish")},
        labels=lambda batch: batch["targets"].float(),
        config={"problem_type": "regression"},
        keys={"scale_targets": False},
    ),
    "token_classification": Entry(
        row=lambda words: {"tokens": words, "tags": tags(words)},
        labels=lambda batch: batch["targets"][:, : batch["input_ids"].shape[1]],
        auto="TokenClassification",
    ),
    "language_modelling": Entry(row=lambda words: {"text": " ".join(words)}, auto="CausalLM", model=decoder),
    "instruction": Entry(
        row=lambda words: {"instruction": " ".join(words), "output": " ".join(reversed(words[:6]))},
        auto="CausalLM",
        model=decoder,
    ),
    "sequence_to_sequence": Entry(
        row=lambda words: {"instruction": " ".join(words), "output": " ".join(reversed(words[:6]))},
        labels=lambda batch: batch["targets"],
        trainer="Seq2Seq",
        auto="Seq2SeqLM",
        model=sequences,
    ),
    "segmentation": Entry(
        file=write_masks,
        labels=lambda batch: batch["targets"].long(),
        auto="SemanticSegmentation",
        learning_rate=6e-5,  # the paper's; batch norm and AdamW enlarge differences of rounding
        model=segformer,
    ),
    "embedding": Entry(
        row=lambda words: {"anchor": " ".join(words), "positive": " ".join(reversed(words))},
        example=pair,
        trainer="SentenceTransformer",
    ),
    "visual_instruction": Entry(file=conversations, auto="ImageTextToText", model=llava),
}
# ----------------------------------------------------------------------------------------------------------------------


def _tokenizer(folder: Path, *signs: str) -> int:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[PAD]", "[UNK]", "<s>", "</s>", *signs, *WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "bos_token": "<s>", "eos_token": "</s>"}
    more = {"additional_special_tokens": [*signs], "model_max_length": 64}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special, **more).save_pretrained(folder)
    return len(words)


class Ready:
    """A task's model and rows, and the same for the Trainer."""

    def __init__(self, name: str, entry: Entry, folder: Path) -> None:
        torch.manual_seed(0)
        rng, task = np.random.default_rng(0), entry.task or name
        place = entry.model(folder)
        if entry.file is not None:
            path = entry.file(folder, rng)
        else:
            assert entry.row is not None
            made = [entry.row([str(w) for w in rng.choice(WORDS, rng.integers(8, LONGEST - 16))]) for _ in range(ROWS)]
            path = folder / "rows.jsonl"
            path.write_text("".join(f"{json.dumps(row)}\n" for row in made))
        table = load_table(DataSpec(path=str(path), test_fraction=0), seed=0, task=task)
        spec = ModelSpec(
            str(place), task=task, max_length=LONGEST, device="cpu", adaptation=AdaptationSpec("full"), **entry.keys
        )
        self.model: Model = load_model(spec, classes=table.classes, kind=table.kind, task=task)
        self.rows: Rows = self.model.prepare(table, range(ROWS))
        self.w: Params = self.model.params()
        self.entry, self.place = entry, place
        self.orders = list(self.job().orders())

    def job(self) -> Job:
        data = ClientData(lambda: self.rows, lambda: Rows(), lambda: Rows())
        return Job(
            Client("a", data, self.model, {}, 5, trainer=train_client),
            self.w,
            replace(LOCAL, learning_rate=self.entry.learning_rate),
        )

    def ours(self) -> Any:
        """The local pass of fedfm."""
        job = self.job()
        return job.client.trainer(job.client, job.w, job.local, job.terms)

    def trainer(self, *, logs: bool = False) -> Any:
        """A Trainer that has not begun, with the weights of the start; ``logs``: whether it keeps each step's loss."""
        folder = tempfile.mkdtemp(dir=self.place)
        self.model.load(self.w)
        theirs = self._theirs()
        for module in theirs.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            elif isinstance(getattr(module, "dropout", None), float):
                module.dropout = 0.0
        steps: dict[str, Any] = {
            "per_device_train_batch_size": LOCAL.batch_size,
            "num_train_epochs": 1,
            "logging_steps": 1,
        }
        steps["logging_strategy"] = "steps" if logs else "no"
        package = sentence_transformers if self.entry.trainer == "SentenceTransformer" else transformers
        how = getattr(package, f"{self.entry.trainer}TrainingArguments")(
            output_dir=folder,
            learning_rate=self.entry.learning_rate,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            **steps,
        )
        of = {"loss": MultipleNegativesRankingLoss(theirs)} if package is sentence_transformers else {}
        kind = type("InOrder", (InOrder, getattr(package, f"{self.entry.trainer}Trainer")), {})
        trainer = kind(theirs, how, data_collator=_collate, train_dataset=Dataset.from_list([{"a": "", "b": ""}]), **of)
        trainer.examples = self.examples
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.remove_callback(SentenceTransformerModelCardCallback)
        trainer.orders = self.orders
        return trainer

    def _theirs(self) -> Any:
        """The peer's model, with the weights of ours."""
        if self.entry.trainer == "SentenceTransformer":
            body = Transformer(str(self.place), model_kwargs={"add_pooling_layer": False})
            body.model.load_state_dict(self.model.module.state_dict())
            return SentenceTransformer(modules=[body, Pooling(SHAPE["hidden_size"])], device="cpu")
        config = dict(self.entry.config) | ({"num_labels": len(self.model.classes)} if self.model.classes else {})
        theirs = getattr(transformers, f"AutoModelFor{self.entry.auto}").from_pretrained(self.place, **config)
        theirs.load_state_dict(self.model.module.state_dict())
        return theirs

    @property
    def examples(self) -> list[dict[str, Tensor]]:
        """The rows as examples of the Trainer."""
        return [self._example(i) for i in range(len(self.rows))]

    def _example(self, i: int) -> dict[str, Tensor]:
        batch = _image_arguments.for_model(self.rows.batch([i]))
        if self.entry.example is not None:
            return self.entry.example(self.model, batch)
        inputs = {key: value[0] for key, value in batch.items() if key not in ("labels", "targets", "starts")}
        known = self.model._arguments
        return {key: value for key, value in inputs.items() if key in known} | {"labels": self.entry.labels(batch)[0]}


class InOrder:
    """Makes a trainer take the given batches."""

    orders: Sequence[np.ndarray]
    examples: Sequence[dict[str, Tensor]]

    def get_train_dataloader(self) -> Any:
        batches = [order.tolist() for order in self.orders]
        return torch.utils.data.DataLoader(self.examples, batch_sampler=batches, collate_fn=_collate)


def _collate(examples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """A batch, padded to its longest row."""
    return {key: _pad([example[key] for example in examples], -100 if key == "labels" else 0) for key in examples[0]}


def _pad(values: Sequence[Tensor], with_: int) -> Tensor:
    if values[0].dim() != 1 or len({len(value) for value in values}) == 1:
        return torch.stack([*values])
    return nn.utils.rnn.pad_sequence([*values], batch_first=True, padding_value=with_)


def losses(ready: Ready) -> Iterator[tuple[float, float]]:
    """The losses of each step, of fedfm and of the Trainer."""
    mine, known = list[float](), ready.model.loss

    def record_loss(batch: Batch) -> Tensor:
        found = known(batch)
        mine.append(float(found.detach()))
        return found

    ready.model.loss = record_loss  # type: ignore[method-assign]
    ready.ours()
    del ready.model.loss
    trainer = ready.trainer(logs=True)
    trainer.train()
    theirs = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    yield from zip(mine, theirs, strict=True)


def measure(name: str, entry: Entry, turns: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A row of the table, and the goals."""
    ready = Ready(name, entry, Path(tempfile.mkdtemp(dir=common.scratch())))
    apart = max(abs(a - b) for a, b in losses(ready))
    waiting: list[Any] = []

    def theirs() -> None:
        waiting.pop().train()

    times: common.Times = {"fedfm": [], "Trainer": []}
    memory: dict[str, list[float]] = {"fedfm": [], "Trainer": []}
    for turn in range(turns + 1):
        waiting.append(ready.trainer())  # made outside of the time
        gc.collect()
        for variant, run in (("fedfm", ready.ours), ("Trainer", theirs)):
            added = common.added_mib(run)
            wall, cpu_before = time.perf_counter(), time.process_time()
            run()
            if turn:  # the first turn warms up
                times[variant].append((time.perf_counter() - wall, time.process_time() - cpu_before))
                memory[variant] += [added] if added else []
    cpu = common.ratio(times["fedfm"], times["Trainer"])
    row: dict[str, Any] = {
        "task": name,
        "steps": len(ready.orders),
        "largest difference of a loss": apart,
        "fedfm, CPU s": common.median(times["fedfm"]),
        "Trainer, CPU s": common.median(times["Trainer"]),
        "CPU, times the Trainer's": cpu,
        "fedfm adds, MiB": _middle(memory["fedfm"]),
        "Trainer adds, MiB": _middle(memory["Trainer"]),
    }
    goals = [
        common.goal(f"{name}: largest difference of a loss", apart, most=LOSS),
        common.goal(f"{name}: CPU time, times the Trainer's", cpu["median"], most=RATIO),
    ]
    if memory["Trainer"]:
        times_more = statistics.median(memory["fedfm"]) / statistics.median(memory["Trainer"])
        goals.append(common.goal(f"{name}: memory, times the Trainer's", times_more, most=RATIO))
    return row, goals


def _middle(values: Sequence[float]) -> dict[str, float] | None:
    """The median with the least and the largest; None without values."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)} if values else None


def main() -> None:
    options = common.arguments(
        __doc__,
        only={"nargs": "+", "choices": list(ENTRIES), "default": list(ENTRIES)},
        turns={"type": int, "default": 5},
    )
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows, goals = [], []
    for name in options.only:
        row, more = measure(name, ENTRIES[name], 1 if options.quick else options.turns)
        rows.append(row)
        goals += more
    table = {"title": f"One local pass over {ROWS} rows, {LOCAL.epochs} epochs in batches of {LOCAL.batch_size}"}
    common.emit("Tasks compared with the Trainer of transformers", [{**table, "rows": rows}], goals, [MEMORY])


if __name__ == "__main__":
    main()
