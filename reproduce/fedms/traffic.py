"""Table 1, Table 4 and Figure 7 of the paper: trained numbers, bytes sent, seconds a round by the speed of the link.

    python reproduce/fedms/traffic.py          # after python reproduce/run.py fedms --only pacs --seeds 0

Writes docs/results/fedms-traffic.md. First of the small runs: from ``metrics.jsonl`` of seed 0, by stage. Then of CLIP
ViT-B/16, whose weights need not be there: numbers counted from its shapes, 4 bytes each. Seconds are of what one client
sends in one round, one way.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import CLIPConfig, CLIPModel

from fedfm.methods.fedclip import Attention
from fedfm.methods.fedms.gate import Gate

RUNS = Path(__file__).resolve().parents[1] / ".runs" / "fedms"
PAGE = RUNS.parents[2] / "docs" / "results" / "fedms-traffic.md"
ROWS = ("ft", "lfft", "promptfl", "fedclip", "stage_one", "fedms")
SPEEDS = (0.1, 1, 10)  # MB/s
SPEED_HEADS = " | ".join(f"s at {s:g} MB/s" for s in SPEEDS)


def seconds(megabytes: float) -> str:
    """Cells: the time to send this at each speed."""
    return " | ".join(f"{megabytes / s:.3g}" for s in SPEEDS)


def stages(row: str) -> dict[str, tuple[int, float, float]]:
    """Stage -> (numbers trained, MB up, MB down), a client and round, of the run of seed 0."""
    folder = RUNS / f"pacs__{row}-seed0"
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    method, trained, clients = (
        manifest["experiment"]["method"],
        manifest["model"]["trainable"],
        len(manifest["clients"]),
    )
    if row == "fedms":
        first = method["global_rounds"]
        gate = sum(p.numel() for p in Gate(192).parameters())
        spans = {"stage one": (trained, 0, first), "stage two": (trained + gate, first, len(metrics) - 1)}
    else:
        own = sum(p.numel() for p in Attention(192).parameters()) if row == "fedclip" else trained
        spans = {"": (own, 0, len(metrics) - 1)}
    found = {}
    for stage, (numbers, a, b) in spans.items():
        up, down = ((metrics[b][k] - metrics[a][k]) / (b - a) / clients / 1e6 for k in ("bytes_up", "bytes_down"))
        found[stage] = (numbers, up, down)
    return found


INTRO = """# What FedMS trains and sends

`python reproduce/fedms/traffic.py`, after `python reproduce/run.py fedms --only pacs --seeds 0`

A client, a round; seconds are those of what it sends to the server. The paper's Table 1 gives 0.1 % of the model for
stage one, 0.27 % for stage two, 100 % for FT, 50 % for LFFT and 0.005 % for PromptFL. Its Table 4 gives 264,195 numbers
for the gate's adapter, whose one output can only say 1; the adapter here has two outputs: 264,710. Its Figure 7 gives
5,984 s for FT at 0.1 MB/s and 3.08 s for FedMS, which fits the mean of stage one and of the gate's last layer alone.
The whole adapter takes 10.6 s.
"""


def main() -> None:
    """Write both tables, and print them."""
    small = [(f"{row} {stage}".strip(), *found) for row in ROWS for stage, found in stages(row).items()]
    total = small[0][1]
    lines = ["## Measured: nano-clip on PACS, ten clients", ""]
    lines.append(f"| method | numbers trained | % of the model | MB up | MB down | FT sends | {SPEED_HEADS} |")
    lines.append(f"|---|{'---|' * (5 + len(SPEEDS))}")
    for name, trained, up, down in small:
        cells = f"{trained:,} | {100 * trained / total:.3g} | {up:.4g} | {down:.4g} | {small[0][2] / up:,.0f} x"
        lines.append(f"| {name} | {cells} | {seconds(up)} |")
    lines += ["", "## Counted: CLIP ViT-B/16", ""]
    lines.append(f"| method | numbers trained | % of the model | MB up | FT sends | {SPEED_HEADS} |")
    lines.append(f"|---|{'---|' * (4 + len(SPEEDS))}")
    rows = of_the_paper()
    for name, trained, sent in rows:
        megabytes = 4 * sent / 1e6
        cells = f"{trained:,} | {100 * trained / rows[0][1]:.3g} | {megabytes:.4g} | {rows[0][2] / sent:,.0f} x"
        lines.append(f"| {name} | {cells} | {seconds(megabytes)} |")
    text = "\n".join([INTRO, *lines, ""])
    PAGE.write_text(text, encoding="utf-8")
    print(text)


def of_the_paper() -> list[tuple[str, int, int]]:
    """(row, numbers trained, numbers sent) of CLIP ViT-B/16; all of it first."""
    with torch.device("meta"):
        clip = CLIPModel(CLIPConfig(vision_config={"hidden_size": 768, "patch_size": 16, "intermediate_size": 3072,
            "num_hidden_layers": 12, "num_attention_heads": 12}))  # fmt: skip
        gate = Gate(clip.projection_dim)
    every = sum(p.numel() for p in clip.parameters())
    encoders = (clip.vision_model.encoder.layers, clip.text_model.encoder.layers)
    half = sum(p.numel() for blocks in encoders for block in blocks[len(blocks) // 2 :] for p in block.parameters())
    half += clip.visual_projection.weight.numel() + clip.text_projection.weight.numel()
    linear = [m for blocks in encoders for block in blocks for m in (block.mlp.fc1, block.mlp.fc2)]
    lora = sum(m.in_features + m.out_features for m in linear)
    adapter = sum(p.numel() for p in gate.parameters())
    return [
        ("FT", every, every),
        ("LFFT, half of the blocks and the projections", half, half),
        ("PromptFL, 16 tokens", *[16 * clip.config.text_config.hidden_size] * 2),
        ("FedMS stage one, rank 1", lora, lora),
        ("FedMS stage two, adapter of the gate", lora + adapter, sum(t.numel() for t in gate.tensors().values())),
        (
            "FedMS stage two with the gate's last layer only",
            lora + gate.output.weight.numel() + 2 + 4,
            gate.output.weight.numel() + 10,
        ),
    ]


if __name__ == "__main__":
    main()
