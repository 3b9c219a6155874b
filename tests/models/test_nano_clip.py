import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer, VisionTextDualEncoderModel

from fedfm.models.locate import locate
from fedfm.models.quiet import quiet

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
PROMPTS = ["a photo of a dog.", "a drawing of a guitar."]
# Printed by reproduce/weights/nano_clip/by_hand.py, a forward pass in numpy.
TOKENS = [[2, 37, 1176, 1511, 37, 389, 18, 3], [2, 37, 3346, 889, 1511, 37, 761, 18, 3]]
LOGITS = [[-0.8974, 3.2778], [0.9882, 1.6909]]  # pictures by prompts


@pytest.fixture(scope="module")
def folder():
    return Path(locate("nano-clip"))


@pytest.fixture(scope="module")
def clip(folder):
    with quiet():
        model, found = VisionTextDualEncoderModel.from_pretrained(folder, output_loading_info=True)
    assert not any(found.values()), found
    return model.eval()


@pytest.fixture(scope="module")
def tools(folder):
    return AutoTokenizer.from_pretrained(folder), AutoImageProcessor.from_pretrained(folder)


def drawn(k: int) -> Image.Image:
    """The stripes and the rings that by_hand.py draws."""
    y, x = np.mgrid[:80, :80]
    waves = [(2 + c) * x + 3 * y if k == 0 else (x - 40) ** 2 // (c + 3) + (y - 30) ** 2 // 5 for c in range(3)]
    return Image.fromarray(np.stack([v % 256 for v in waves], -1).astype(np.uint8))


@torch.no_grad()
def logits(clip, tools, prompts, pictures):
    tokenizer, processor = tools
    tokens = tokenizer(prompts, padding=True, return_tensors="pt")
    return clip(**tokens, **processor(pictures, return_tensors="pt")).logits_per_image


def test_the_folder_is_small_and_holds_no_pickle(folder):
    assert (folder / "model.safetensors").stat().st_size < 9e6
    assert {p.suffix for p in folder.iterdir()} == {".json", ".md", ".safetensors"}


def test_size_and_shape(clip):
    assert clip.num_parameters() == 3_628_545
    assert {p.dtype for p in clip.parameters()} == {torch.float32}  # half precision in the file alone
    assert len(clip.vision_model.layers) == 5
    assert len(clip.text_model.encoder.layer) == 3


def test_names_of_common_classes_are_single_tokens(tools):
    for name in ("airplane", "automobile", "bird", "deer", "truck", "elephant", "guitar", "person"):
        assert tools[0].tokenize(name.upper()) == [name]
    assert tools[0].tokenize("glioma")[-1].startswith("##")  # other words are spelled
    assert tools[0].unk_token_id not in tools[0]("Quixotic zyzzyva, 42 %?")["input_ids"]


def test_logits_are_those_computed_by_hand(clip, tools):
    assert tools[0](PROMPTS)["input_ids"] == TOKENS
    np.testing.assert_allclose(logits(clip, tools, PROMPTS, [drawn(0), drawn(1)]), LOGITS, atol=2e-3)


def test_a_shorter_prompt_is_padded_without_effect(clip, tools):
    long = [*PROMPTS, "a photo of a very small and very old bird in a green garden."]
    pictures = [drawn(0), drawn(1)]
    torch.testing.assert_close(
        logits(clip, tools, long, pictures)[:, :2], logits(clip, tools, PROMPTS, pictures), rtol=1e-4, atol=1e-4
    )


@pytest.mark.skipif(not (SHARED / "load.py").exists(), reason=f"{SHARED}, which has CIFAR-10, is absent")
def test_zero_shot_on_pictures_that_it_never_saw(clip, tools, monkeypatch):
    monkeypatch.syspath_prepend(str(SHARED))
    data = importlib.import_module("load").images("cifar10", split="test")
    rows = np.random.default_rng(0).permutation(len(data["y"]))[:200]
    prompts = [f"a photo of a {name}." for name in data["classes"]]
    guess = logits(clip, tools, prompts, [Image.fromarray(x) for x in data["x"][rows]]).argmax(1)
    assert np.mean(guess.numpy() == data["y"][rows]) >= 0.35
