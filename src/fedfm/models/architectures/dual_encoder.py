"""Image classification by class names, with both encoders: CLIP, SigLIP, vision-text dual encoder.

Learning Transferable Visual Models From Natural Language Supervision. Radford et al. ICML 2021. Section 3.1.
Sigmoid Loss for Language Image Pre-Training. Zhai, Mustafa, Kolesnikov, Beyer. ICCV 2023. arXiv:2303.15343.
Learning to Prompt for Vision-Language Models (CoOp). Zhou, Yang, Loy, Liu. IJCV 2022. arXiv:2109.01134. Section 3.2.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedfm.errors import InputError

if TYPE_CHECKING:
    from transformers import CLIPModel, SiglipModel, VisionTextDualEncoderModel

MODEL_TYPES = ("clip", "siglip", "vision-text-dual-encoder")
MAX_LOG_SCALE = math.log(100)  # CLIP's training clips logit_scale at this value
_IMAGE_SIDE = ("clip.vision_model.", "clip.visual_projection.")
_CONSTANT = ("clip.logit_scale", "clip.logit_bias")


@dataclass(frozen=True)
class Prompts:
    """The prompts for C classes from P templates, as tokens.

    Attributes:
        input_ids: int64 (P, C, L).
        attention_mask: int64 (P, C, L).
        context: positions of the learned context vectors; empty if there are none.
    """

    input_ids: Tensor
    attention_mask: Tensor
    context: range = range(0)


class DualEncoder(nn.Module):
    """logits = s <V(x), T>: scaled cosines between the image's features V and the class names' features T.

    s = exp(logit_scale), at most 100, is never trained. SigLIP's bias is the same for all classes and is left out.

    Args:
        clip: the model of two encoders.
        prompts: at their context positions, learned vectors (zero at the start) replace the word embeddings.
    """

    base_model_prefix = "clip"
    clip: CLIPModel | SiglipModel | VisionTextDualEncoderModel
    input_ids: Tensor  # (P, C, L)
    attention_mask: Tensor  # (P, C, L)
    fixed_texts: Tensor | None  # (C, d)

    def __init__(self, clip: CLIPModel | SiglipModel | VisionTextDualEncoderModel, prompts: Prompts) -> None:
        super().__init__()
        self.config, self.clip = clip.config, clip
        self.register_buffer("input_ids", prompts.input_ids)
        self.register_buffer("attention_mask", prompts.attention_mask)
        self.register_buffer("fixed_texts", None, persistent=False)
        self._kept: list[Tensor] | None = None  # text features (C, d), cached by :meth:`keeping_texts`
        self._places = prompts.context
        self.context: nn.Embedding | None = None
        if prompts.context:
            words = clip.text_model.get_input_embeddings()
            shape = len(prompts.context), words.embedding_dim
            self.context = nn.Embedding(*shape, _weight=torch.zeros(shape))

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(b, 3, H, W) -> logits (b, C)."""
        return self.logits(self.images(pixel_values))

    def logits(self, images: Tensor, texts: Tensor | None = None) -> Tensor:
        """Image features V (b, d) -> logits (b, C), float32, for text features T (C, d), by default :meth:`texts`."""
        return F.linear(images.float(), self.scale * (self.texts() if texts is None else texts).float())

    @property
    def scale(self) -> Tensor:
        """The scale s, a scalar tensor."""
        return self.clip.logit_scale.detach().float().clamp(max=MAX_LOG_SCALE).exp().squeeze()  # type: ignore[no-any-return]

    def images(self, pixel_values: Tensor) -> Tensor:
        """The image features V (b, d), with norm 1."""
        return F.normalize(self.clip.get_image_features(pixel_values=pixel_values).pooler_output, dim=-1)

    def texts(self) -> Tensor:
        """The text features T (C, d), with norm 1: the normalised mean over the templates' normalised features."""
        if self.fixed_texts is not None:
            return self.fixed_texts
        if self._kept is None or torch.is_grad_enabled():
            return self.encode_texts()
        if not self._kept:
            self._kept.append(self.encode_texts())
        return self._kept[0]

    def encode_texts(self, context: Tensor | None = None) -> Tensor:
        """Compute the text features T (C, d), with these context vectors (M, h) or, by default, the learned ones."""
        return mean_direction([self.template_features(p, context) for p in range(len(self.input_ids))])

    def template_features(self, p: int, context: Tensor | None = None) -> Tensor:
        """The features (C, d), with norm 1, of template p's prompts; for ``context`` see :meth:`encode_texts`."""
        ids, mask = self.input_ids[p], self.attention_mask[p]
        if self.context is None:
            out = self.clip.get_text_features(input_ids=ids, attention_mask=mask)
        else:
            vectors, words = self.context.weight if context is None else context, self.clip.text_model
            with words.get_input_embeddings().register_forward_hook(lambda *io: self._insert_context(vectors, io[-1])):
                out = self.clip.get_text_features(input_ids=ids, attention_mask=mask)
        return F.normalize(out.pooler_output.float(), dim=-1).to(out.pooler_output.dtype)

    @contextmanager
    def keeping_texts(self) -> Iterator[None]:
        """Context manager: while gradients are off, the text features are computed only once.

        The weights must not change within the context.
        """
        before, self._kept = self._kept, []
        try:
            yield
        finally:
            self._kept = before

    def fix_texts(self) -> None:
        """Compute the text features once and keep them. Call it only if they do not depend on trained weights."""
        with torch.no_grad():
            self.fixed_texts = self.encode_texts()

    @property
    def width(self) -> int:
        """The width d of a feature."""
        siglip = self.clip.config.model_type == "siglip"
        return int(self.clip.config.vision_config.hidden_size if siglip else self.clip.config.projection_dim)

    @property
    def trains_images(self) -> bool:
        """Whether any parameter on which V depends is trained."""
        return any(p.requires_grad for name, p in self.named_parameters() if name.startswith(_IMAGE_SIDE))

    @property
    def trains_texts(self) -> bool:
        """Whether any parameter on which T depends is trained."""
        return any(p.requires_grad for name, p in self.named_parameters() if not name.startswith(_IMAGE_SIDE))

    @property
    def projections(self) -> tuple[nn.Module, nn.Module]:
        """The modules that map each encoder's last hidden states into the common space; images first."""
        clip: Any = self.clip
        if clip.config.model_type == "siglip":
            return clip.vision_model.head, clip.text_model.head
        return clip.visual_projection, clip.text_projection

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """As ``nn.Module.requires_grad_``, but scale and bias are never trained."""
        super().requires_grad_(requires_grad)
        for name, parameter in self.named_parameters():
            if name in _CONSTANT:
                parameter.requires_grad_(False)
        return self

    def _insert_context(self, context: Tensor, words: Tensor) -> Tensor:
        """Word embeddings (C, L, h) with the context vectors (M, h) at their positions."""
        context = context.to(words.dtype).expand(len(words), -1, -1)  # (C, M, h)
        return torch.cat([words[:, : self._places.start], context, words[:, self._places.stop :]], 1)


def mean_direction(features: Sequence[Tensor]) -> Tensor:
    """The normalised mean (C, d) of P tensors (C, d) of norm 1; a single tensor is returned unchanged."""
    return features[0] if len(features) == 1 else F.normalize(torch.stack(list(features)).mean(0), dim=-1)


def words_of(classes: Sequence[str]) -> list[str]:
    """The class names in the form for a text encoder: underscores become spaces.

    Raises:
        InputError: all names are numbers, a name is empty, or two are equal.
    """
    words = [name.replace("_", " ").strip() for name in classes]
    right = 'name the classes in words: "classes" of an npz file, a column data.label_name, or names as labels'
    if blank := [i for i, word in enumerate(words) if not word]:
        raise InputError(f'data.label: class {blank[0]} of {len(words)} is named "{classes[blank[0]]}"; {right}')
    if all(re.fullmatch(r"-?\d+", word) for word in words):
        raise InputError(
            f'data.label: the classes are numbers ({", ".join(words[:5])}), which model.task = "zero_shot" cannot '
            f"read; {right}"
        )
    if twice := [word for word in words if words.count(word) > 1]:
        raise InputError(
            f'data.label: {words.count(twice[0])} classes are named "{twice[0]}"; expected different names'
        )
    return words


def tokenise(
    tokenizer: Any, classes: Sequence[str], templates: Sequence[str], *, length: int, whole: bool, context: int = 0
) -> Prompts:
    """The prompts as tokens.

    Args:
        tokenizer: the text encoder's tokenizer, which pads on the right.
        classes: class names.
        templates: texts with one ``{}`` for the name.
        length: the largest number of tokens that the text encoder reads.
        whole: whether to pad to ``length`` instead of to the longest prompt.
        context: number of learned vectors between the start token and the name, in place of the templates.

    Raises:
        InputError: :func:`words_of` refuses the class names, or a prompt is too long.
    """
    words = words_of(classes)
    texts = [f"{word}." for word in words] if context else [t.format(word) for t in templates for word in words]
    rows: list[list[int]] = tokenizer(texts)["input_ids"]
    places = range(0)
    if context:
        bare = tokenizer(texts[0], add_special_tokens=False)["input_ids"]
        start = next(i for i in range(len(rows[0])) if rows[0][i : i + len(bare)] == bare)
        filler = tokenizer("X", add_special_tokens=False)["input_ids"][:1]  # CoOp's filler; its embedding is replaced
        rows = [row[:start] + filler * context + row[start:] for row in rows]
        places = range(start, start + context)
    longest, text = max((len(row), text) for row, text in zip(rows, texts, strict=True))
    if longest > length:
        key = f"model.adaptation.tokens = {context}" if context else "model.templates"
        raise InputError(
            f'{key}: "{text:.60}" makes a prompt of {longest} tokens; expected at most {length}, the smaller of '
            "model.max_length and the text encoder's limit"
        )
    padding = {"padding": "max_length", "max_length": length} if whole else {"padding": "longest"}
    batch = tokenizer.pad({"input_ids": rows}, return_tensors="pt", **padding)
    ids = batch["input_ids"].view(-1, len(words), batch["input_ids"].shape[1])
    mask = batch["attention_mask"].view_as(ids) if "attention_mask" in batch else torch.ones_like(ids)
    return Prompts(ids, mask, places)
