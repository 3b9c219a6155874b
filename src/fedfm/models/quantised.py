"""Quantised bases: frozen linear maps in 4 or 8 bits, by bitsandbytes.

``nf4``: each block of 64 weights has a scale, and each block of 256 scales has a scale itself (double quantisation).
QLoRA: Efficient Finetuning of Quantized LLMs. Dettmers, Pagnoni, Holtzman, Zettlemoyer. NeurIPS 2023. arXiv:2305.14314.

``int8``: each output has a scale, and columns with outliers are multiplied in float16.
LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale. Dettmers et al. NeurIPS 2022. arXiv:2208.07339.

The experts of a mixture are parameters, not modules for linear maps. They can be quantised to nf4, but not to int8
(:mod:`.quantised_experts`).

Trained tensors are float32. Heads, embeddings, norms and modules that are new for the task keep ``model.dtype``. The
quantised maps also compute in this dtype. PEFT's ``prepare_model_for_kbit_training`` is not used, because it would make
heads, embeddings and norms float32: with 128,000 tokens, these would then take as much memory as the maps in 4 bits.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedfm.errors import InputError
from fedfm.models import quantised_experts
from fedfm.models.adapters.stacked import wrap
from fedfm.models.families import unwrap
from fedfm.models.locate import DTYPES
from fedfm.models.quantised_maps import maps as maps
from fedfm.models.quantised_maps import of_folder as of_folder
from fedfm.models.spec import ModelSpec
from fedfm.models.stored_files import StoredWeights

BLOCK = 64  # number of weights that share a scale
KINDS = {"Linear4bit": "nf4", "Linear8bitLt": "int8"}  # class of a linear map in bitsandbytes -> its format
TRAINS_WEIGHTS = ("full", "top_layers")
_EXTRA = 'pip install "fedfm[quantized]"'


def describe(spec: ModelSpec, config: Any) -> str | None:
    """The quantisation of the base, in words for messages; None if it is not quantised.

    Raises:
        InputError: bitsandbytes is missing, or the model's folder, the adaptation and ``model.quantization`` do not fit
            together.
    """
    stored = of_folder(config)
    if stored is None and spec.quantization is None:
        return None
    word = f'model.quantization = "{spec.quantization}"' if spec.quantization else f"model.name: {spec.name!r}"
    if stored is None and getattr(config, "quantization_config", None) is not None:
        raise InputError(f"{word}: the weights of {spec.name!r} are already quantised; drop it")
    if stored is not None:
        own = "int8" if stored.get("load_in_8bit") else str(stored.get("bnb_4bit_quant_type", "fp4"))
        if spec.quantization not in (None, own):
            raise InputError(f"{word}: {spec.name!r} is already quantised, as {own}; drop it")
    if spec.weights == "random":
        raise InputError(f'{word}: it rounds the weights of a checkpoint; expected model.weights = "pretrained"')
    check_adaptation(spec, word)
    need(word)
    return word


def check_adaptation(spec: ModelSpec, word: str) -> None:
    """Refuse an adaptation that trains quantised weights.

    Raises:
        InputError: the adaptation trains them.
    """
    if spec.adaptation is not None and spec.adaptation.name in TRAINS_WEIGHTS:
        raise InputError(
            f'{word}: adaptation "{spec.adaptation.name}" trains weights that are rounded to a few bits, in which a '
            'step of an optimiser vanishes; expected "lora", "ffa_lora" or "head"'
        )


def need(word: str) -> None:
    """Raise an InputError if bitsandbytes is missing or too old for transformers."""
    from transformers.utils import is_bitsandbytes_available

    if not is_bitsandbytes_available():
        from transformers.utils.import_utils import BITSANDBYTES_MIN_VERSION

        raise InputError(f"{word} needs bitsandbytes {BITSANDBYTES_MIN_VERSION} or newer: {_EXTRA}")


def keep_format(module: nn.Module) -> None:
    """Prevent bitsandbytes from changing the quantised weights after loading.

    On processors with bfloat16, bitsandbytes would pack the weights again at the first evaluation, with scales of 8
    bits. Then results would depend on what was computed before.

    Raises:
        InputError: the folder has a map that bitsandbytes computes wrongly on this device, see :func:`odd_maps`.
    """
    for path, linear in maps(module):
        linear.support_avx512bf16_for_cpu = False
        four = type(linear).__name__ == "Linear4bit" and linear.weight.device.type == "cpu"
        if four and linear.in_features % BLOCK:
            raise InputError(
                f"model.name: {path} has {linear.in_features} inputs in 4 bits, and on a CPU bitsandbytes computes "
                f"only with multiples of {BLOCK}; expected a GPU, or the folder with the weights before quantisation"
            )


def odd_maps(skeleton: nn.Module, spec: ModelSpec) -> list[str]:
    """Paths of the linear maps that are not quantised to ``nf4``, because their width is not a multiple of ``BLOCK``.

    For the rows of such maps bitsandbytes (0.50) uses wrong scales on a CPU. The maps keep floating point on every
    device, so that all silos have the same base.
    """
    if spec.quantization != "nf4":
        return []
    linear = [(n, m) for n, m in skeleton.named_modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"]
    widths = {n: m.in_features if isinstance(m, nn.Linear) else m.weight.shape[0] for n, m in linear}
    return [n for n, width in widths.items() if width % BLOCK]


def settings(spec: ModelSpec, stored: Mapping[str, Any] | None, keep: Sequence[str]) -> Any:
    """The ``BitsAndBytesConfig`` of the folder if its weights are quantised, else of ``model.quantization``.

    Args:
        keep: paths of the modules that are not quantised.
    """
    from transformers import BitsAndBytesConfig

    about: dict[str, Any] = dict(stored) if stored is not None else {"load_in_8bit": spec.quantization == "int8"}
    if stored is None and spec.quantization == "nf4":
        about |= {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    about["llm_int8_skip_modules"] = sorted({*(about.get("llm_int8_skip_modules") or ()), *keep})
    about["bnb_4bit_compute_dtype"] = DTYPES[spec.dtype]
    known = {k: v for k, v in about.items() if not k.startswith("_") and k != "quant_method"}
    return BitsAndBytesConfig(**known)


def kind_of(module: nn.Module) -> str | None:
    """``nf4`` or ``int8`` if the module has quantised maps or experts (fp4 counts as nf4), else None."""
    for _, linear in maps(module):
        return str(KINDS[type(linear).__name__])
    return "nf4" if has_experts(module) else None


def has_experts(module: nn.Module) -> bool:
    """Whether experts of a mixture are in 4 bits."""
    return any(isinstance(m, quantised_experts.OnBits) for m in module.modules())


def in_floats(module: nn.Module, head: str) -> str:
    """A notice that names the matrices that are not quantised, except embeddings and the head.

    It is empty if these matrices have less than a hundredth of the parameters.
    """
    sizes, bytes_, whole = dict[str, int](), 0, unwrap(module)
    out = whole.get_output_embeddings() if hasattr(whole, "get_output_embeddings") else None
    packed = sum(m.in_features * m.out_features for _, m in maps(module))
    packed += sum(math.prod(m.size) for m in module.modules() if isinstance(m, quantised_experts.Bits))
    plain = [m for m in module.modules() if not type(m).__module__.startswith("bitsandbytes.")]
    total = packed + sum(p.numel() for m in plain for p in m.parameters(recurse=False) if not p.requires_grad)
    for path, m in module.named_modules():
        if m not in plain or isinstance(m, nn.Embedding) or m is out or (head and f".{head}." in f".{path}."):
            continue
        for name, p in m.named_parameters(recurse=False):
            if p.dim() > 1 and not p.requires_grad:
                leaf = path.replace(".base_layer", "").rpartition(".")[2] if name == "weight" else name
                sizes[leaf] = sizes.get(leaf, 0) + p.numel()
                bytes_ += p.numel() * p.element_size()
    if sum(sizes.values()) < total / 100:
        return ""
    first = sorted(sizes, key=lambda leaf: -sizes[leaf])[:4]
    more = ", ..." if len(sizes) > len(first) else ""
    share = 100 * sum(sizes.values()) / total
    return (
        f"model.quantization: {', '.join(first)}{more} keep floating point: {share:.0f} % of the parameters, "
        f"{bytes_ / 2**20:,.1f} of {nbytes(module) / 2**20:,.1f} MiB"
    )


def weight_of(linear: Any) -> Tensor:
    """The weight (n, m) of a quantised map in floating point, on its device."""
    from bitsandbytes import functional

    if type(linear).__name__ == "Linear4bit":
        return functional.dequantize_4bit(linear.weight.data, linear.weight.quant_state)  # type: ignore[no-any-return]
    scales = linear.state.SCB if linear.weight.SCB is None else linear.weight.SCB
    return functional.int8_vectorwise_dequant(linear.weight.data, scales)  # type: ignore[no-any-return]


def nbytes(module: nn.Module) -> int:
    """Bytes of the module's parameters and buffers, and of the scales and tables of its quantised maps."""
    found = {t.untyped_storage().data_ptr(): t for t in (*module.parameters(), *module.buffers())}
    for _, linear in maps(module):
        state = getattr(linear.weight, "quant_state", None)
        scales = [linear.state.SCB if linear.weight.SCB is None else linear.weight.SCB] if state is None else _of(state)
        found |= {t.untyped_storage().data_ptr(): t for t in scales}
    return sum(t.untyped_storage().nbytes() for t in found.values())


def _of(state: Any) -> Iterator[Tensor]:
    """The scales and tables of a 4-bit map."""
    yield from (state.absmax, state.code)
    if state.nested:
        yield from (state.state2.absmax, state.state2.code, state.offset)


def make_plain(module: nn.Module, dtype: torch.dtype) -> None:
    """Replace every quantised map by a linear map with its dequantised weights, in this dtype, on the CPU."""
    from transformers.pytorch_utils import Conv1D

    quantised_experts.unpack(module, dtype)
    for path, linear in list(maps(module)):
        n, m = linear.out_features, linear.in_features
        transposed = getattr(linear, "source_cls", nn.Linear) is Conv1D  # GPT-2's maps store the weight as (m, n)
        with torch.device("meta"):
            new = Conv1D(n, m) if transposed else nn.Linear(m, n, bias=linear.bias is not None)
        weight = weight_of(linear).to("cpu", dtype)
        new.weight = nn.Parameter(weight.T.contiguous() if transposed else weight, requires_grad=False)
        if linear.bias is not None:
            new.bias = nn.Parameter(linear.bias.detach().to("cpu", dtype), requires_grad=False)
        module.set_submodule(path, new)
    for name in ("is_loaded_in_4bit", "is_loaded_in_8bit", "is_quantized", "hf_quantizer", "quantization_method"):
        vars(module).pop(name, None)
    config: Any = getattr(module, "config", None)
    if hasattr(config, "quantization_config"):
        del config.quantization_config


def rebuild(module: Any, dtype: torch.dtype) -> nn.Module:
    """A module with the same trained tensors on the dequantised base; changes ``module``.

    This is needed before an adapter is merged: PEFT would add the adapter to the quantised weights, and round the sum.
    """
    if not hasattr(module, "peft_config"):
        make_plain(module, dtype)
        return module  # type: ignore[no-any-return]
    config = copy.copy(module.peft_config["default"])
    floats = ((name, p) for name, p in module.named_parameters() if p.dtype.is_floating_point)
    held = {name: p.detach().to("cpu", copy=True) for name, p in floats}  # copies, since the new base shares the heads
    base = module.unload()
    make_plain(base, dtype)
    config.fan_in_fan_out = any(type(m).__name__ == "Conv1D" for m in base.modules())
    again = wrap(base.cpu(), config)
    with torch.no_grad():
        for name, p in again.named_parameters():
            if name in held:
                p.copy_(held[name])
    return again


class Unquantised(Mapping[str, Tensor]):
    """The state that a module would have if it were loaded without quantisation, one tensor at a time.

    Args:
        skeleton: the module without values, on the device ``meta``.
        alike: whether the file's tensors have the module's shapes; the tensors of a quantised folder do not.
    """

    def __init__(self, skeleton: Any, checkpoint: StoredWeights, *, alike: bool = True) -> None:
        self._state, self._checkpoint = skeleton.state_dict(), checkpoint
        prefix = f"{skeleton.base_model_prefix}."
        tied: dict[str, str] = dict(getattr(skeleton, "all_tied_weights_keys", {}))
        tied |= {source: target for target, source in tied.items()}
        self._names: dict[str, str] = {}
        for name in self._state:
            options = [name, tied.get(name, name)]
            options += [n.removeprefix(prefix) for n in options] + [f"{prefix}{n}" for n in options]
            found = next((n for n in options if n in checkpoint), None)
            if found is not None and (not alike or checkpoint.shape(found) == tuple(self._state[name].shape)):
                self._names[name] = found

    @property
    def missing(self) -> set[str]:
        """Names of the module's tensors for which the checkpoint has no tensor of the same shape."""
        return set(self._state) - set(self._names)

    @property
    def leftovers(self) -> set[str]:
        """Names of the checkpoint's tensors that have no place in the module."""
        return set(self._checkpoint) - set(self._names.values())

    @property
    def by_file(self) -> dict[str, Tensor]:
        """The module's tensors without values, by their names in the files."""
        return {found: self._state[name] for name, found in self._names.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._checkpoint[self._names[name]].to(self._state[name].dtype)

    def differ(self, tied: Mapping[str, str]) -> bool:
        """Whether the files have two values for two names of one weight; transformers then makes two weights of it."""
        both = ((a, b) for a, b in tied.items() if a in self._names and b in self._names)
        return any(self._names[a] != self._names[b] and not self[a].equal(self[b]) for a, b in both)

    def part(self, name: str, rows: slice) -> Tensor:
        """Some rows of a tensor; the others are not read."""
        return self._checkpoint.part(self._names[name], rows).to(self._state[name].dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def readable(weights: Unquantised, skeleton: Any, head: str | None, dtype: torch.dtype) -> bool:
    """Whether the files have all tensors under the module's names and in ``dtype``; a new head may be missing.

    If not, the files lack more than a head, or use other names, which transformers changes while it loads them.

    Args:
        head: the path of the head that may be new; None if no head can be new, as in a language model.
    """
    if dtype != torch.float32 and getattr(skeleton, "_keep_in_fp32_modules", None):
        return False
    first = None if head is None else head.partition(".")[0]
    return all(name.partition(".")[0] == first for name in weights.missing)


def empty(module: nn.Module, new: Sequence[str]) -> None:
    """Replace the parameters on ``meta`` by zeros on the CPU.

    A parameter of the ``new`` modules gets memory of its own. All others only need the memory of one number.
    """
    for path, part in module.named_modules():
        for name, p in list(part.named_parameters(recurse=False)):
            own = any(path == n or path.startswith(f"{n}.") for n in new)
            zeros = torch.zeros(p.shape if own else (), dtype=p.dtype).expand(p.shape)
            setattr(part, name, nn.Parameter(zeros, requires_grad=False))
