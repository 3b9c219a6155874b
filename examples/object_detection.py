"""Pictures with boxes: three plants look for parts on a belt. It needs no download; pictures and model are made here.

python examples/object_detection.py
python examples/object_detection.py --model PekingU/rtdetr_r18vd
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from transformers import (
    RTDetrConfig,
    RTDetrForObjectDetection,
    RTDetrResNetConfig,
    Trainer,
    TrainingArguments,
)

import fedfm

SIDE, CLASSES = 64, ("disc", "plate", "wedge")
PLANTS = {"north": (0.9, 0.05, 0.05), "south": (0.05, 0.9, 0.05), "west": (0.05, 0.05, 0.9)}  # shares of the classes


def draw(rng: np.random.Generator, shares) -> dict:
    """A picture of one part or two, and the target of transformers' detectors: classes, and boxes from 0 to 1."""
    picture = Image.new("RGB", (SIDE, SIDE), tuple(rng.integers(0, 90, 3).tolist()))
    pen, boxes, labels = ImageDraw.Draw(picture), [], rng.choice(3, rng.integers(1, 3), p=shares).tolist()
    for label in labels:
        size, colour = int(rng.integers(14, 28)), tuple(rng.integers(140, 255, 3).tolist())
        x, y = rng.integers(0, SIDE - size, 2).tolist()
        if label == 2:
            pen.polygon([(x, y + size), (x + size, y + size), (x + size // 2, y)], fill=colour)
        else:
            (pen.ellipse, pen.rectangle)[label]((x, y, x + size, y + size), fill=colour)
        boxes.append([(x + size / 2) / SIDE, (y + size / 2) / SIDE, size / SIDE, size / SIDE])  # centre, width, height
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 127.5 - 1
    return {"pixel_values": pixels, "labels": {"class_labels": torch.tensor(labels), "boxes": torch.tensor(boxes)}}


def collate(rows: list[dict]) -> dict:
    """Pictures as one tensor; targets as a list of dicts, since pictures differ in their number of boxes."""
    return {"pixel_values": torch.stack([row["pixel_values"] for row in rows]), "labels": [r["labels"] for r in rows]}


def overlap(box: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Intersection over union of a box and each of the others (n,)."""
    low, high = box[:2] - box[2:] / 2, box[:2] + box[2:] / 2
    lows, highs = others[:, :2] - others[:, 2:] / 2, others[:, :2] + others[:, 2:] / 2
    both = np.clip(np.minimum(high, highs) - np.maximum(low, lows), 0, None).prod(1)
    return both / (box[2:].prod() + others[:, 2:].prod(1) - both)


def scores_and_boxes(outputs: tuple, _) -> tuple:
    """The parts of the model's outputs (losses, logits, boxes, ...) that :func:`average_precision` needs."""
    logits, boxes = outputs[1:3]
    own_class = logits.shape[-1] > len(CLASSES)  # YOLOS and DETR have a last class for "no object", RT-DETR has none
    return (logits.softmax(-1)[..., :-1] if own_class else logits.sigmoid()), boxes


def average_precision(found) -> dict[str, float]:
    """Average precision by class at an overlap of 0.5, and its mean; ``found`` is transformers' EvalPrediction."""
    scores = np.concatenate([batch[0] for batch in found.predictions])  # (n, queries, classes)
    boxes = np.concatenate([batch[1] for batch in found.predictions])  # (n, queries, 4)
    targets = [target for batch in found.label_ids for target in batch]
    by_class = {}
    for k, name in enumerate(CLASSES):
        real = [target["boxes"][target["class_labels"] == k] for target in targets]
        free, hits = [[True] * len(each) for each in real], []
        for place in np.argsort(-scores[..., k], axis=None):
            row, query = divmod(int(place), scores.shape[1])
            shares = overlap(boxes[row, query], real[row]) * free[row] if len(real[row]) else np.zeros(1)
            hits.append(bool(shares.max() >= 0.5))
            if hits[-1]:
                free[row][int(shares.argmax())] = False
        precision = np.cumsum(hits) / np.arange(1, len(hits) + 1)
        highest = np.maximum.accumulate(precision[::-1])[::-1]
        if any(map(len, real)):
            by_class[name] = float(highest[hits].sum() / sum(map(len, real)))
    return {"map_50": float(np.mean(list(by_class.values()))), "by_class": by_class}


def tiny() -> RTDetrForObjectDetection:
    """An RT-DETR with random weights, so that the example needs no download."""
    widths = [16, 32, 48, 64]
    backbone = RTDetrResNetConfig(
        embedding_size=16, hidden_sizes=widths, depths=[1] * 4, layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip
    sizes = dict.fromkeys(("encoder_hidden_dim", "d_model"), 48) | {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_layers": 2, "num_queries": 10}
    config = RTDetrConfig(
        **sizes, backbone_config=backbone, encoder_in_channels=widths[1:], decoder_in_channels=[48] * 3,
        freeze_backbone_batch_norms=False, num_denoising=0, num_labels=len(CLASSES),
    )  # fmt: skip
    return RTDetrForObjectDetection(config)


def main(words: list[str] | None = None) -> dict[str, float]:
    """Train together and each plant alone; return the precision of each model on the test rows of all plants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=80, help="training pictures of each plant")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args(words)
    folder, rng = Path(tempfile.mkdtemp()), np.random.default_rng(0)
    clients = {name: [draw(rng, shares) for _ in range(args.rows)] for name, shares in PLANTS.items()}
    test = [draw(rng, None) for _ in range(args.rows)]

    def build() -> Trainer:
        torch.manual_seed(0)
        settings = TrainingArguments(
            output_dir=folder / "trainer", learning_rate=1e-3, per_device_train_batch_size=8, num_train_epochs=2,
            lr_scheduler_type="linear", max_grad_norm=1.0, remove_unused_columns=False,
            eval_do_concat_batches=False, report_to=[],
        )  # fmt: skip
        told = {"eval_dataset": test, "data_collator": collate, "compute_metrics": average_precision}
        return Trainer(tiny(), settings, **told, preprocess_logits_for_metrics=scores_and_boxes)

    result = fedfm.federate(build(), clients=clients, rounds=args.rounds, out=folder / "together")
    found = {"together": result["details"]["metrics"]["map_50"]}
    for name, rows in clients.items():
        alone = fedfm.federate(build(), clients={name: rows}, rounds=args.rounds, out=folder / name)
        found[f"{name} alone"] = alone["details"]["metrics"]["map_50"]
    for name, precision in found.items():
        print(f"{name:12} {precision:.3f} mean average precision at an overlap of 0.5, {len(test)} test pictures")
    print(f"run: {result['run']}")
    return found


if __name__ == "__main__":
    main()
