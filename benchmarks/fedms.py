"""A client's round of FedMS's stage two, against a hand-written PyTorch + PEFT loop; and the memory of many clients.

    python benchmarks/fedms.py
    python benchmarks/fedms.py --memory 20

Models: nano-clip, and a CLIP of the shape that reproduce/weights/small_clip makes (a ViT-tiny of 12 blocks, 224 pixels,
and a BERT of 6 blocks, width 384), with random weights: 10 classes, one prompt each. Both halves train the same client
on the same mini-batches with AdamW, in turn (A B A B), on one thread. The hand-written loop has the adapters "global"
and "local" on one base, computes both experts whole for every batch, switches between them, and trains the top k blocks
only. The benchmark stops if the two end with different local experts.

A client's first round also computes what the later ones find again: the global expert's features and the states below
the top k blocks. It is listed beside a later round. The backward pass is timed alone in rounds of FedMS.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
import torch.nn.functional as F

from fedfm import models
from fedfm.core.client import Client, ClientData
from fedfm.core.rows import Rows
from fedfm.linalg.params import Params
from fedfm.methods.fedms import mixture
from fedfm.methods.fedms.fedms import FedMS
from fedfm.methods.fedms.gate import Gate, initial
from fedfm.models.dual_encoder import DualModel, active_layers, need
from fedfm.models.layers import layers
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.training import AdamW
from fedfm.training.local_job import Job
from fedfm.training.scheduler import train_client

CLASSES = ("plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
BATCH = 32
LOCAL = AdamW(1e-3, batch_size=BATCH, weight_decay=0.05)
MEMORY = 64 << 20  # bytes of prepared pictures, and of hidden states in files
SMALL = "ViT-tiny and MiniLM"


def small_clip(folder: Path) -> Path:
    """Write the model of two encoders; the tokenizer knows the words of the prompts."""
    from tokenizers import Tokenizer, pre_tokenizers, processors
    from tokenizers.models import WordLevel
    from transformers import (
        BertConfig,
        PreTrainedTokenizerFast,
        VisionTextDualEncoderConfig,
        VisionTextDualEncoderModel,
        ViTConfig,
    )
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    words = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "photo", "of", ".", *CLASSES)
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    vision = ViTConfig(
        hidden_size=192, num_hidden_layers=12, num_attention_heads=3, intermediate_size=768, pooler_act="linear"
    )
    text = BertConfig(
        vocab_size=30522, hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    )
    torch.manual_seed(0)
    config = VisionTextDualEncoderConfig.from_vision_text_configs(vision, text, projection_dim=384)
    VisionTextDualEncoderModel(config).save_pretrained(folder)
    ViTImageProcessorPil(size={"height": 224, "width": 224}).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", bos_token="[CLS]", eos_token="[SEP]"
    ).save_pretrained(folder)
    return folder


def load_clip(folder: str) -> DualModel:
    """The model with LoRA of rank 1 in both encoders."""
    spec = ModelSpec(folder, task="zero_shot", adaptation=AdaptationSpec("lora", rank=1), device="cpu")
    return need(load_model(spec, classes=CLASSES, kind="image"))


def draw_rows(model: DualModel, n: int) -> Rows:
    """Random pictures with labels."""
    draw = torch.Generator().manual_seed(0)
    side = model.dual.clip.config.vision_config.image_size
    return Rows({"pixel_values": torch.randn(n, 3, side, side, generator=draw)}, labels=torch.arange(n) % len(CLASSES))


def move_parameters(w: Params, seed: int) -> Params:
    """An expert that differs from the base."""
    draw = torch.Generator().manual_seed(seed)
    return w.map(lambda x: x + 0.02 * torch.randn(x.shape, generator=draw))


class HandWritten:
    """What one writes without a framework: PEFT with two adapters on one base, switched for every batch."""

    def __init__(self, model: DualModel, folder: str) -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import VisionTextDualEncoderModel

        self.paths = sorted({name.partition(".lora_")[0].partition("clip.")[2] for name in model.names})
        config = LoraConfig(r=1, lora_alpha=1, target_modules=self.paths)
        base = VisionTextDualEncoderModel.from_pretrained(folder)
        self.peft = get_peft_model(base, config, adapter_name="global")
        self.peft.add_adapter("local", copy.deepcopy(config))
        self.peft.eval()  # no dropout in either
        self.clip: Any = self.peft.get_base_model()
        self.live = dict(self.peft.named_parameters())
        self.ids, self.mask = model.dual.input_ids[0], model.dual.attention_mask[0]
        self.scale = self.clip.logit_scale.detach().exp()
        self.blocks = [[path.partition("clip.")[2] for path, _ in blocks] for blocks in model.parts.encoders]

    def name(self, ours: str, adapter: str) -> str:
        return "base_model.model." + ours.partition("clip.")[2].replace(".default.", f".{adapter}.")

    def features(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        images = self.clip.get_image_features(pixel_values=pixels).pooler_output
        texts = self.clip.get_text_features(input_ids=self.ids, attention_mask=self.mask).pooler_output
        return F.normalize(images, dim=-1), F.normalize(texts, dim=-1)

    def round(self, client: Client, W_g: Params, W_i: Params, Z: Params, k: int) -> tuple[Params, float]:
        with torch.no_grad():
            for adapter, w in (("global", W_g), ("local", W_i)):
                for name, value in w.items():
                    self.live[self.name(name, adapter)].copy_(value)
        active = [f"{path}." for paths in self.blocks for path in paths[-k:]]
        names = [self.name(n, "local") for n in W_i]
        trained = [self.live[n] for n in names if any(a in n for a in active)]
        gate = Gate(len(Z["hidden.bias"])).load(Z).train()
        optimiser = torch.optim.AdamW([*trained, *gate.parameters()], lr=LOCAL.learning_rate, weight_decay=0.05)
        rows, total = client.data.train, 0.0
        assert rows.labels is not None
        for index in Job(client, W_i, LOCAL).orders():
            pixels, y = rows.tensors["pixel_values"][index], rows.labels[index]
            self.peft.set_adapter("global")
            with torch.no_grad():
                V_g, T_g = self.features(pixels)
            self.peft.set_adapter("local")
            for p in self.live.values():  # set_adapter lets the whole adapter be trained
                p.requires_grad_(False)
            for p in trained:
                p.requires_grad_(True)
            V_i, T_i = self.features(pixels)
            lam = gate(V_g)[:, None]
            of_i = V_i @ T_i.T
            O = lam * (V_g @ T_g.T) + (1 - lam) * of_i.detach()  # noqa: E741
            L_gate, L_expert = F.cross_entropy(self.scale * O, y), F.cross_entropy(self.scale * of_i, y)
            optimiser.zero_grad()
            (L_gate + L_expert).backward()
            optimiser.step()
            total += len(index) * L_gate.item()
        return Params({n: self.live[self.name(n, "local")].detach().clone() for n in W_i}), total / len(rows)


def of_model(name: str, folder: str, rows: int, ks: tuple[int, ...], turns: int) -> list[dict[str, Any]]:
    """A row for every k."""
    model = load_clip(folder)
    peer, method = HandWritten(model, folder), FedMS(local=LOCAL)
    data = draw_rows(model, rows)
    client = Client("a", ClientData(lambda: data, Rows, Rows), model, {}, 5, trainer=train_client)
    W_g, other, Z = move_parameters(model.params(), 1), move_parameters(model.params(), 2), initial(model.dual.width, 0)
    named = layers(model, "layer")
    out = []
    for k in ks:
        W_i = W_g.replace({n: other[n] for layer in active_layers(model, k) for n in named[layer]})
        backward: list[float] = []
        ends: dict[str, tuple[Params, float]] = {}

        def theirs(W_i: Params = W_i, k: int = k, ends: Any = ends) -> None:
            ends["theirs"] = peer.round(client, W_g, W_i, Z, k)

        def ours(W_i: Params = W_i, k: int = k, ends: Any = ends, backward: Any = backward) -> None:
            w, _, loss = method.local_pass(client, W_g, W_i, Z, k)
            ends["ours"] = w, loss
            backward.append(client.metrics["backward_seconds"])

        def first(run: Callable[[], None] = ours) -> None:
            for known in (mixture._rows, mixture._texts):
                known.clear()  # type: ignore[attr-defined]
            run()

        times = common.interleave({"theirs": theirs, "first": first, "ours": ours}, turns)
        (w, loss), (expected, expected_loss) = ends["ours"], ends["theirs"]
        off = (w - expected).norm() / (expected - W_i).norm()
        if not (off < 1e-2 and abs(loss - expected_loss) < 1e-4 * expected_loss):
            raise SystemExit(f"{name}, k = {k}: the local experts differ by {off:g} of their change")
        out.append(
            {
                "model": name,
                "active layers k": k,
                "of": max(map(len, model.parts.encoders)),
                "hand-written, CPU s": common.median(times["theirs"]),
                "fedfm, first round": common.median(times["first"]),
                "fedfm, later round": common.median(times["ours"]),
                "ratio of a first round": common.ratio(times["theirs"], times["first"]),
                "ratio of a later round": common.ratio(times["theirs"], times["ours"]),
                "backward, s": statistics.median(backward[2:]),
                "experts differ by": f"{off:.0e}",
            }
        )
    return out


def peak(clients: int, rows: int) -> float:
    """MiB of this process at the end of a run of one round of stage one and two of stage two, one worker."""
    import fedfm

    os.environ["FEDFM_MEMORY"] = str(MEMORY)
    with tempfile.TemporaryDirectory() as folder:
        draw, n = np.random.default_rng(0), clients * rows
        y = np.arange(n + 20) % len(CLASSES)
        x = draw.integers(0, 255, (n + 20, 32, 32, 3), dtype=np.uint8)
        split = np.array(["train"] * n + ["test"] * 20)
        np.savez(f"{folder}/rows.npz", x=x, y=y, split=split, classes=np.array(CLASSES))
        adaptation = {"name": "lora", "rank": 1}
        tables = {
            "data": {"path": f"{folder}/rows.npz", "partition": {"name": "iid", "clients": clients}},
            "model": {
                "name": str(small_clip(Path(folder) / "model")),
                "task": "zero_shot",
                "adaptation": adaptation,
                "device": "cpu",
            },
            "method": {"name": "fedms", "global_rounds": 1, "local_rounds": 2, "local": {"name": "adamw"}},
            "run": {"workers": 1, "evaluate_every": 0},
        }
        fedfm.run(tables, f"{folder}/run")
    # Of this program alone: ru_maxrss would also count the size of the process that started it.
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


def main() -> None:
    options = common.arguments(
        __doc__,
        memory={"type": int, "metavar": "CLIENTS", "help": "the peak of one run in this process"},
        rows={"type": int, "default": 64, "help": "of a client"},
        turns={"type": int, "default": 2},
    )
    torch.set_num_threads(1)
    if options.memory:
        print(json.dumps({"mib": peak(options.memory, options.rows // 2)}))
        return
    folder, turns, rows = common.scratch(), 1 if options.quick else options.turns, 32 if options.quick else options.rows
    nano = str(Path(models.__file__ or "").parent / "nano_clip")
    table = of_model(SMALL, str(small_clip(folder / "clip")), rows, (1, 6, 12), turns)
    table += of_model("nano-clip", nano, rows, (1, 3, 5), turns)
    few, many = (common.child(__file__, "--memory", str(n), "--rows", str(rows))["mib"] for n in (2, 20))
    memory = {"2 clients, MiB": round(few), "20 clients, MiB": round(many), "ratio": round(many / few, 3)}
    one, whole = table[0], table[2]
    ratios = "ratio of a later round"
    share = one["backward, s"] / whole["backward, s"] * 12
    goals = [
        common.goal("times the hand-written loop, one active layer", one[ratios]["median"], least=3),
        common.goal("times the hand-written loop, all layers active", whole[ratios]["median"], least=1.5),
        common.goal("backward of one layer over a twelfth of that of all", share, most=1.5),
        common.goal("peak of 20 clients over that of 2", many / few, most=1.1),
    ]
    tables = [
        {"title": f"A client's round of stage two, {rows} rows, batches of {BATCH}, one thread", "rows": table},
        {
            "title": f"Peak resident size of a whole run, {rows // 2} rows a client, FEDFM_MEMORY of 64 MiB, {SMALL}",
            "rows": [memory],
        },
    ]
    common.emit("FedMS: stage two", tables, goals)


if __name__ == "__main__":
    main()
