"""Put nano-clip's two encoders, tokenizer and preprocessor into one folder, weights in half precision.

    python join.py --teacher small_clip --data path/to/data --out runs/nano_clip

writes runs/nano_clip/model.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from student import make_processor, make_student, make_tokenizer
from text import imagenet_names
from transformers import VisionTextDualEncoderModel

sys.path.insert(0, str(Path(__file__).parents[1] / "small_clip"))
from build import fit_scale
from pictures import read
from zero_shot import image_embeddings, text_embeddings


def main() -> None:
    """Command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--teacher", type=Path, required=True)
    p.add_argument("--data", type=Path, required=True)
    p.add_argument("--out", type=Path, required=True)
    a = p.parse_args()
    torch.set_num_threads(1)

    tokenizer, processor = make_tokenizer(imagenet_names(a.data)), make_processor()
    model = make_student(VisionTextDualEncoderModel.from_pretrained(a.teacher), tokenizer).eval()
    found = load_file(a.out / "text.safetensors") | load_file(a.out / "image.safetensors")
    model.load_state_dict(found | {"logit_scale": model.logit_scale.detach()})

    seen = read(a.data / "images/tiny_imagenet50.npz", test=False)
    names = F.normalize(text_embeddings(model, tokenizer, seen.classes, ["a photo of a {}."]), dim=1)
    cosines = F.normalize(image_embeddings(model, processor, seen.images()), dim=1) @ names.T
    model.logit_scale.data.fill_(fit_scale(cosines, torch.from_numpy(seen.y)))

    folder = a.out / "model"
    model.half()
    for part in (model, tokenizer, processor):
        part.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    for table in (config, config["text_config"], config["vision_config"]):
        table["dtype"] = "float32"  # what from_pretrained computes in; the file alone is in half precision
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    size = (folder / "model.safetensors").stat().st_size
    print(f"{folder}: {model.num_parameters():,} parameters, {size / 1e6:.1f} MB, scale {model.logit_scale.exp():.1f}")


if __name__ == "__main__":
    main()
