"""A model with two encoders, and the hidden states that two LoRA experts on it share.

FedMS (Wu, Li, Wang, Wang) has a frozen global expert and a local one, both LoRA on one base. Below the lowest layer in
which the local LoRA is trained, both experts compute the same. So the global expert computes the hidden states once,
and the local expert resumes from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fedfm.core.rows import Batch, Rows
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.models.adapters import lora
from fedfm.models.architectures.dual_encoder import DualEncoder, mean_direction, tokenise
from fedfm.models.families import unwrap
from fedfm.models.model import Model
from fedfm.models.precision import reduced_precision
from fedfm.models.row_batches import fixed_batches

Blocks = Sequence[tuple[str, nn.Module]]


class DualModel(Model):
    """A :class:`Model` whose module is a :class:`DualEncoder`, adapted or not.

    Attributes:
        dual: the module below PEFT's wrapper.
        images_fixed: whether the images' features depend on no trained parameter; :meth:`encode` then returns features.
    """

    def __init__(self, module: nn.Module, **about: Any) -> None:
        super().__init__(module, **about)
        self.dual: DualEncoder = unwrap(module)
        self.images_fixed = not self.dual.trains_images
        if not self.dual.trains_texts:
            self.dual.fix_texts()

    def encode(self, rows: Rows) -> Rows:
        """The rows unchanged, or their ``features`` V (n, d) if these depend on no trained parameter."""
        if not self.images_fixed or "features" in rows.tensors:
            return rows
        return Rows({"features": self.features(rows)}, labels=rows.labels)

    def features(self, rows: Rows) -> Tensor:
        """The images' features V (n, d), with norm 1, on the CPU."""
        if "features" in rows.tensors:
            return rows.tensors["features"]
        with self.evaluating():
            return self.by_batches(rows, self.dual.images)

    def logits(self, batch: Batch) -> Tensor:
        """The logits (b, C) of a batch of rows or of encoded rows."""
        if "features" in batch:
            with reduced_precision(self.spec.dtype, self.device):
                return self.dual.logits(batch["features"].to(self.device))
        return super().logits(batch)

    def written_texts(self) -> Tensor:
        """The text features T (C, d), with norm 1, of the prompts of ``model.templates``, without learned vectors.

        Raises:
            InputError: a prompt is too long for the text encoder.
        """
        siglip = self.dual.config.model_type == "siglip"
        length = self.dual.input_ids.shape[-1] if siglip else self.tools.max_length
        written = tokenise(self.tools.tokenizer, self.classes, self.task.class_templates, length=length, whole=siglip)
        with self.evaluating():
            return DualEncoder(self.dual.clip, written).to(self.device).encode_texts()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Like :meth:`Model.evaluating`; in addition, the texts are encoded only once inside it."""
        with super().evaluating(), reduced_precision(self.spec.dtype, self.device), self.dual.keeping_texts():
            yield

    def by_batches(self, rows: Rows, function: Callable[[Tensor], Tensor]) -> Tensor:
        """The results (n, ...) of ``function`` for all images, on the CPU; each call of the function gets 32 rows."""
        done = [function(batch["pixel_values"].to(self.device))[:n].cpu() for batch, n in fixed_batches(rows)]
        return torch.cat(done) if done else torch.zeros(0, self.dual.texts().shape[-1])


def need(model: Model) -> DualModel:
    """The model, if it has two encoders.

    Raises:
        InputError: the model does not have two encoders; the error names settings that work.
    """
    if isinstance(model, DualModel):
        return model
    raise InputError(
        f'model.task = "{model.task}", model.adaptation.name = "{model.adaptation}": the method needs a model of two '
        'encoders, both adapted: task = "zero_shot" with a CLIP, and adaptation "lora"'
    )


def active_layers(model: Model, k: int) -> tuple[str, ...]:
    """Paths of the top k blocks of both encoders; an encoder with fewer blocks gives all of them."""
    return tuple(path for blocks in model.parts.encoders for path, _ in _split(blocks, k)[1])


def expert_features(model: Model, w: Params, rows: Rows) -> Tensor:
    """The images' features V (n, d) with the LoRA tensors w in evaluation mode. They have norm 1 and are on the CPU."""
    with install(model, w) as own:
        return own.by_batches(rows, own.dual.images)


def expert_texts(model: Model, w: Params) -> Tensor:
    """The class names' features T (C, d) with the LoRA tensors w in evaluation mode. They have norm 1."""
    with install(model, w) as own:
        return own.dual.texts()


def boundary_images(model: DualModel, rows: Rows, k: int) -> Tensor:
    """The images' states (n, T, h) below the top k blocks, on the CPU. Call it within :func:`install`."""
    return model.by_batches(rows, lambda x: _entering(model.parts.blocks, k, lambda: model.dual.images(x)))


def images_with_states(model: DualModel, rows: Rows, k: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the images' features V (b, d) and their states (b, T, h) below the top k blocks, on the CPU.

    Each item is for at most 32 rows. Call it within :func:`install`.
    """
    caught: list[Tensor] = []
    hook = _split(model.parts.blocks, k)[1][0][1].register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    try:
        for batch, n in fixed_batches(rows):
            V = model.dual.images(batch["pixel_values"].to(model.device))
            yield V[:n].cpu(), caught.pop()[:n].cpu()
    finally:
        hook.remove()


def boundary_texts(model: DualModel, k: int) -> Tensor:
    """The prompts' states (P, C, L, h) below the top k blocks. Call it within :func:`install`."""
    run, blocks = model.dual.template_features, model.parts.text_blocks
    return torch.stack([_entering(blocks, k, lambda p=p: run(p)) for p in range(len(model.dual.input_ids))])  # type: ignore[misc]


def top_images(model: Model, states: Tensor, k: int, *, train: bool) -> Tensor:
    """The images' features V (b, d), with norm 1, from the states (b, T, h) below the top k blocks.

    The top k blocks compute with the model's own tensors. The result equals the complete forward pass in every bit if
    the states are of the same batch and no lower block has dropout.

    Args:
        train: whether to compute with gradients and LoRA's dropout instead of in evaluation mode.
    """
    own = need(model)
    states = states.to(own.device)
    with _mode(own, train), _resume(own.dual.clip.vision_model.embeddings, own.parts.blocks, k, states):
        return own.dual.images(states)  # the embedding is skipped, so no pixels are read


def top_texts(model: Model, states: Tensor, k: int, *, train: bool) -> Tensor:
    """The class names' features T (C, d), with norm 1, from the states (P, C, L, h) below the top k blocks.

    See :func:`top_images`.
    """
    own, features = need(model), []
    with _mode(own, train):
        for p, state in enumerate(states.to(own.device)):
            with _resume(own.dual.clip.text_model.embeddings, own.parts.text_blocks, k, state):
                features.append(own.dual.template_features(p))
        return mean_direction(features)


def image_trunk(model: Model) -> dict[str, Tensor]:
    """The trunk: copies of the frozen weights of the last image block and of the final norm."""
    last, norm = _trunk(need(model))
    named = [(f"block.{n}", p) for n, p in last.named_parameters() if ".lora_" not in n]
    named += [] if norm is None else [(f"norm.{n}", p) for n, p in norm.named_parameters()]
    return {name: p.detach().clone() for name, p in named}


def trunk_paths(model: Model) -> dict[str, str]:
    """The paths of ``block`` and ``norm``, which :func:`image_trunk` copies, inside the transformers model."""
    own = need(model)
    paths = {module: name for name, module in own.dual.clip.named_modules()}
    last, norm = _trunk(own)
    return {"block": paths[last]} | ({} if norm is None else {"norm": paths[norm]})


def trunk_images(model: Model, w: Params, trunk: Mapping[str, Tensor], states: Tensor) -> Tensor:
    """The images' features V (b, d), with norm 1, and with gradients for the ``trunk``.

    They are computed from the states (b, T, h) that enter the last image block. This block and the final norm use the
    weights of the ``trunk`` and the LoRA tensors w. LoRA has no dropout here.
    """
    own = need(model)
    last, norm = _trunk(own)
    path = next(p for p, block in own.parts.blocks if block is last)
    within = {n.partition(f"{path}.")[2]: t for n, t in w.items() if f"{path}." in n}
    values = {("block", n): t.to(own.device) for n, t in within.items()}
    values |= {tuple(name.split(".", 1)): t for name, t in trunk.items()}  # type: ignore[misc]
    training = [module for module in own.train_too if module.training]
    with ExitStack() as stack:
        for (place, name), tensor in values.items():
            owner, _, short = name.rpartition(".")
            parameters = (last if place == "block" or norm is None else norm).get_submodule(owner)._parameters
            stack.callback(parameters.__setitem__, short, parameters[short])
            parameters[short] = tensor  # type: ignore[assignment]
        for module in training:
            module.eval()
            stack.callback(module.train)
        states = states.to(own.device)
        stack.enter_context(_resume(own.dual.clip.vision_model.embeddings, own.parts.blocks, 1, states))
        return own.dual.images(states)


def _trunk(model: DualModel) -> tuple[nn.Module, nn.Module | None]:
    """(last image block, final norm)."""
    return model.parts.blocks[-1][1], model.parts.norm


def _split(blocks: Blocks, k: int) -> tuple[Blocks, Blocks]:
    """(the blocks below, the top k blocks).

    Raises:
        ValueError: k is below 1.
    """
    if k < 1:
        raise ValueError(f"the top {k} blocks; expected at least 1")
    at = max(len(blocks) - k, 0)
    return blocks[:at], blocks[at:]


@contextmanager
def install(model: Model, w: Params) -> Iterator[DualModel]:
    """Context manager: the model has the parameters w in evaluation mode, and its previous parameters afterwards."""
    own, before = need(model), model.params()
    try:
        with lora.apply(own, w), own.evaluating():
            yield own
    finally:
        own.load(before)


def _mode(model: DualModel, train: bool) -> Any:
    """Context manager: training mode if ``train``, else evaluation mode."""
    if not train:
        return model.evaluating()
    if not any(module.training for module in model.train_too):
        model.train_mode()
    return nullcontext()


def _entering(blocks: Blocks, k: int, run: Callable[[], Tensor]) -> Tensor:
    """The input of the lowest of the top k blocks when ``run`` runs an encoder; the top k blocks compute nothing."""
    caught: list[Tensor] = []
    upper = [block for _, block in _split(blocks, k)[1]]

    def keep(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        caught.append(x)
        return x

    with _replace_forwards(dict.fromkeys(upper, _pass) | {upper[0]: keep}):
        run()
    return caught[0]


@contextmanager
def _resume(embedding: nn.Module, blocks: Blocks, k: int, state: Tensor) -> Iterator[None]:
    """Context manager: an encoder skips everything below its top k blocks, which start from the given state."""
    lower, upper = _split(blocks, k)
    hook = upper[0][1].register_forward_pre_hook(lambda _, args: (state, *args[1:]))
    try:
        with _replace_forwards({embedding: lambda *args, **kwargs: state} | {block: _pass for _, block in lower}):
            yield
    finally:
        hook.remove()


def _pass(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x


@contextmanager
def _replace_forwards(forwards: dict[nn.Module, Callable[..., Tensor]]) -> Iterator[None]:
    """Context manager: replaces the forward functions of these modules."""
    with ExitStack() as stack:
        for module, forward in forwards.items():
            vars(module)["forward"] = forward
            stack.callback(vars(module).pop, "forward")
        yield
