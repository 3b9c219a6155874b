"""Compare nano-vit with the same architecture at random: frozen linear probes and a short fine-tune on digits.

The digits are scikit-learn's 8x8 scans. They are used here only, never in training or in choosing a checkpoint.

    python probe.py --data path/to/images --model path/to/nano_vit
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor
from train import SETS, make_backbone, read_images
from transformers import AutoImageProcessor, AutoModel, IJepaForImageClassification, PreTrainedModel

Rows = tuple[Tensor, np.ndarray]


def pixels(processor: Callable, x: np.ndarray) -> Tensor:
    """Model input from uint8 [N, H, W, C] through the shipped preprocessor."""
    images = [Image.fromarray(im.squeeze()) for im in x]
    return processor(images, return_tensors="pt")["pixel_values"]


def load(folder: Path) -> PreTrainedModel:
    """The backbone; a student with polynomials needs fedfm to compute them."""
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    if hasattr(model.config, "fedfm_polynomials"):
        from fedfm.encrypted.student import conversion

        conversion.install(model, model.config)
    return model


def digits(processor: Callable) -> tuple[Rows, Rows]:
    """1,297 training and 500 test digits, stratified."""
    d = load_digits()
    x = np.round(d.images * 255 / 16).astype(np.uint8)
    xt, xe, yt, ye = train_test_split(x, d.target, test_size=500, stratify=d.target, random_state=0)
    return (pixels(processor, xt), yt), (pixels(processor, xe), ye)


@torch.no_grad()
def features(model: PreTrainedModel, x: Tensor) -> np.ndarray:
    """Mean of the final tokens: what an image classification head sees."""
    return torch.cat([model(pixel_values=b).last_hidden_state.mean(1) for b in x.split(256)]).numpy()


def probe(train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray]) -> float:
    """Test accuracy in per cent of a logistic regression on standardised features."""
    clf = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=2000))
    return 100 * clf.fit(*train).score(*test)


def few_shot(train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray], draws: int = 20) -> float:
    """Mean probe accuracy over random draws of five training rows per class."""
    f, y = train
    scores = []
    for seed in range(draws):
        rng = np.random.default_rng(seed)
        rows = np.concatenate([rng.permutation(np.flatnonzero(y == c))[:5] for c in range(10)])
        scores.append(probe((f[rows], y[rows]), test))
    return statistics.mean(scores)


def finetune(
    backbone: PreTrainedModel, train: Rows, test: Rows, marks: list[int], lora: bool, seed: int
) -> list[float]:
    """Test accuracy after each number of steps in ``marks``: LoRA with AdamW, or all weights with momentum SGD."""
    torch.manual_seed(seed)
    backbone.config.num_labels = 10
    model = IJepaForImageClassification(backbone.config)
    model.ijepa.load_state_dict(backbone.state_dict())
    opt: torch.optim.Optimizer
    if lora:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"])
        model = get_peft_model(model, config)
        opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 5e-3)
    else:
        opt = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    x, y = train[0], torch.from_numpy(train[1])
    out = []
    for step in range(1, max(marks) + 1):
        rows = torch.randint(len(x), (32,))
        opt.zero_grad()
        torch.nn.functional.cross_entropy(model(pixel_values=x[rows]).logits, y[rows]).backward()
        opt.step()
        if step in marks:
            with torch.no_grad():
                guess = model(pixel_values=test[0]).logits.argmax(1).numpy()
            out.append(100 * float((guess == test[1]).mean()))
    return out


def main() -> None:
    """Command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data", type=Path, help="folder with the npz files; without it only digits are probed")
    p.add_argument("--model", type=Path, required=True, help="folder with config.json and model.safetensors")
    p.add_argument("--seeds", type=int, default=3, help="random networks to average over")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--skip-finetune", action="store_true")
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    warnings.filterwarnings("ignore")

    processor = AutoImageProcessor.from_pretrained(a.model)
    trained = load(a.model)
    fresh = []
    for seed in range(a.seeds):
        torch.manual_seed(seed)
        fresh.append(make_backbone().eval())

    tasks = {"digits": digits(processor)}
    for name in SETS if a.data else ():
        x, y, is_test = read_images(a.data / f"{name}.npz")
        tasks[name] = (pixels(processor, x[~is_test]), y[~is_test]), (pixels(processor, x[is_test]), y[is_test])

    print("| frozen probe, test accuracy % | nano-vit | random weights | raw 32x32 pixels |\n|---|---|---|---|")
    for name, (tr, te) in tasks.items():

        def row(label: str, score: Callable, tr: Rows = tr, te: Rows = te, raw: bool = True) -> None:
            def on(f: Callable[[Tensor], np.ndarray]) -> float:
                return score((f(tr[0]), tr[1]), (f(te[0]), te[1]))

            ours = on(lambda x: features(trained, x))
            rand = statistics.mean(on(lambda x, m=m: features(m, x)) for m in fresh)
            flat = f"{on(lambda x: x.flatten(1).numpy()):.1f}" if raw else "-"
            print(f"| {label} | {ours:.1f} | {rand:.1f} | {flat} |", flush=True)

        # 3,072 correlated colour values make the regression slow for the large sets; digits are where it matters.
        row(f"{name} ({len(tr[0]):,} training rows)", probe, raw=name == "digits")
        if name == "digits":
            row("digits, 50 training rows (5 per class, mean of 20 draws)", few_shot)

    if not a.skip_finetune:
        marks = [10, 25, 50, 100, 200]
        print(f"\n| fine-tune on digits, batch 32, test accuracy % | {' | '.join(f'step {m}' for m in marks)} |")
        print("|---" * (len(marks) + 1) + "|")
        for label, lora in (("LoRA r=8 (AdamW)", True), ("all weights (SGD)", False)):
            for start, nets in (("nano-vit", [trained] * a.seeds), ("random weights", fresh)):
                runs = [finetune(net, *tasks["digits"], marks, lora, seed) for seed, net in enumerate(nets)]
                means = " | ".join(f"{statistics.mean(v):.1f}" for v in zip(*runs, strict=True))
                print(f"| {label}, {start} | {means} |", flush=True)


if __name__ == "__main__":
    main()
