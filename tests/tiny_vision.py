"""Tiny models of texts and images with random weights, and conversations about the colours of images."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220)}
_SIZES = ((20, 20), (32, 20), (20, 40))
_WORDS = ("user", "assistant", ":", "what", "which", "colour", "is", "the", "picture", "it", *COLOURS)
_TEXT: dict[str, Any] = {
    **{"vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256},
    **{"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "initializer_range": 0.2},
}
_VISION: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"image_size": 16, "initializer_range": 0.2},
}
_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ' : ' }}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}{{ 'PLACE' }}{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
    "{{ '</s>' if m['role'] == 'assistant' else ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
)


def _tokenizer(special: Sequence[str], **named: Any) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "<s>", "</s>", *special, *_WORDS]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    usual = {"unk_token": "[UNK]", "pad_token": "[PAD]", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, additional_special_tokens=list(special), **usual, **named
    )


def save_llava(folder: Path) -> Path:
    """One image of fixed size is one row of ``pixel_values``; the last layer of the vision tower is not used."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    torch.manual_seed(7)
    vision = CLIPVisionConfig(**_VISION, patch_size=8, projection_dim=16)
    config = LlavaConfig(text_config=LlamaConfig(**_TEXT), vision_config=vision, image_token_index=4)
    images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    processor = LlavaProcessor(
        image_processor=images,
        tokenizer=_tokenizer(["<image>"]),
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_TEMPLATE.replace("PLACE", "<image>\\n"),
    )
    return _save(LlavaForConditionalGeneration(config), processor, folder)


def save_idefics3(folder: Path) -> Path:
    """As SmolVLM: images are split into a number of parts that depends on their size, padded for each row."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    torch.manual_seed(7)
    parts = [f"<row_{i}_col_{j}>" for i in (1, 2, 3) for j in (1, 2, 3)]
    special = ["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>", *parts]
    config = Idefics3Config(
        text_config={**_TEXT, "model_type": "llama"},
        vision_config={**_VISION, "patch_size": 4},
        image_token_id=4,
        scale_factor=2,
        pad_token_id=0,
    )
    images = Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    template = _TEMPLATE.replace("PLACE", "<image>")
    processor = Idefics3Processor(images, _tokenizer(special), image_seq_len=4, chat_template=template)
    return _save(Idefics3ForConditionalGeneration(config), processor, folder)


def save_smolvlm(folder: Path) -> Path:
    """As Idefics 3, with SmolVLM's own classes; its processor needs num2words."""
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration, SmolVLMProcessor
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    class WithoutVideo(SmolVLMProcessor):
        """Its part for videos needs torchvision."""

        @classmethod
        def get_attributes(cls) -> list[str]:
            return ["image_processor", "tokenizer"]

    WithoutVideo.__name__ = SmolVLMProcessor.__name__
    torch.manual_seed(7)
    parts = [f"<row_{i}_col_{j}>" for i in (1, 2, 3) for j in (1, 2, 3)]
    special = ["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>", *parts]
    config = SmolVLMConfig(
        text_config={**_TEXT, "model_type": "llama"},
        vision_config={**_VISION, "patch_size": 4},
        image_token_id=4,
        scale_factor=2,
        pad_token_id=0,
    )
    images = SmolVLMImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    template = _TEMPLATE.replace("PLACE", "<image>")
    processor = WithoutVideo(images, _tokenizer(special), None, image_seq_len=4, chat_template=template)
    return _save(SmolVLMForConditionalGeneration(config), processor, folder)


def save_gemma3(folder: Path) -> Path:
    """Tokens have types; the tokens of an image see each other."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    torch.manual_seed(7)
    names = {"image_token": "<soft>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    config = Gemma3Config(
        text_config={**_TEXT, "head_dim": 8, "sliding_window": 16},
        vision_config={**_VISION, "patch_size": 4},
        mm_tokens_per_image=4,
        image_token_index=4,
        boi_token_index=5,
        eoi_token_index=6,
    )
    module = Gemma3ForConditionalGeneration(config)
    with torch.no_grad():
        module.model.multi_modal_projector.mm_input_projection_weight.normal_(0, 0.2)  # else zeros
    images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    tokenizer = _tokenizer([*names.values()], extra_special_tokens=names)
    template = _TEMPLATE.replace("PLACE", "<start_of_image>")
    return _save(module, Gemma3Processor(images, tokenizer, image_seq_length=4, chat_template=template), folder)


def save_qwen(folder: Path) -> Path:
    """Qwen2.5-VL: an image is a number of patches that depends on its size."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    class WithoutVideo(Qwen2_5_VLProcessor):
        """Its part for videos needs torchvision."""

        @classmethod
        def get_attributes(cls) -> list[str]:
            return ["image_processor", "tokenizer"]

    WithoutVideo.__name__ = Qwen2_5_VLProcessor.__name__
    torch.manual_seed(7)
    special = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    vision = {"depth": 2, "hidden_size": 16, "out_hidden_size": 16, "num_heads": 2, "intermediate_size": 24}
    config = Qwen2_5_VLConfig(
        text_config={**_TEXT, "rope_parameters": rope},
        vision_config=vision | {"patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1]},
        **{"image_token_id": 4, "video_token_id": 5, "vision_start_token_id": 6, "vision_end_token_id": 7},
    )
    images = Qwen2VLImageProcessorPil(size={"shortest_edge": 64, "longest_edge": 1024}, patch_size=4, merge_size=2)
    template = _TEMPLATE.replace("PLACE", "<|vision_start|><|image_pad|><|vision_end|>")
    processor = WithoutVideo(image_processor=images, tokenizer=_tokenizer(special), chat_template=template)
    return _save(Qwen2_5_VLForConditionalGeneration(config), processor, folder)


def _save(module: Any, processor: Any, folder: Path) -> Path:
    module.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


FAMILIES = {
    **{"llava": save_llava, "idefics3": save_idefics3, "smolvlm": save_smolvlm},
    **{"gemma3": save_gemma3, "qwen": save_qwen},
}


def conversations(folder: Path, n: int = 20) -> list[dict[str, Any]]:
    """Rows about images of one colour, which lie in the folder; every fourth row has two images."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for i in range(n):
        colour = [*COLOURS][i % 3]
        names = [f"{i}-{j}.png" for j in range(2 if i % 4 == 3 else 1)]
        for j, name in enumerate(names):
            shade = tuple(min(value + 2 * i, 255) for value in COLOURS[colour])
            Image.new("RGB", _SIZES[(i + j) % 3], shade).save(folder / name)
        said: Any = [*[{"type": "image"}] * len(names), {"type": "text", "text": "what colour is the picture"}]
        if i % 2:
            said = "<image>" * len(names) + "what colour is the picture"
        answer = {"role": "assistant", "content": f"it is {colour}"}
        rows.append({"messages": [{"role": "user", "content": said}, answer], "images": names})
    return rows


def one_conversation(i: int) -> dict[str, Any]:
    """A short row that has its image in its message."""
    from PIL import Image

    colour = [*COLOURS][i % 3]
    file = io.BytesIO()
    Image.new("RGB", _SIZES[i % 3], tuple(min(value + 2 * i, 255) for value in COLOURS[colour])).save(file, "png")
    image = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    said = [{"type": "image", "image": image}, {"type": "text", "text": "what colour"}]
    return {"messages": [{"role": "user", "content": said}, {"role": "assistant", "content": f"it is {colour}"}]}


def save_rows(folder: Path, n: int = 20, name: str = "rows.jsonl") -> Path:
    """The rows of :func:`conversations` in a file next to their images."""
    path = folder / name
    rows = conversations(folder, n)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path
