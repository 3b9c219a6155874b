"""The [model] table of an experiment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedfm.core import tasks
from fedfm.core.fields import setting
from fedfm.core.open_settings import OpenSettings, Setting

ADAPTATIONS = ("full", "head", "top_layers", "lora", "ffa_lora", "prompt", "side_adapter")
RELEASED = ("class", "grid", "tokens")
ATTENTION = ("eager", "sdpa", "flash_attention_2", "flex_attention")
ALL_LINEAR = "all-linear"
BIASES = ("none", "all", "lora_only")
STARTS = ("default", "gaussian", "random", "pissa", "olora", "eva", "corda", "loftq", "orthogonal", "lora_ga")
_NUMBERS = ("float32", "bfloat16", "float16")
QUANTIZATIONS = ("nf4", "int8")
MODULE = r"[\w.-]+"  # a module's path or its end: PEFT reads such keys as regular expressions, and caches 512 of them
COMPILES = ("default", "reduce-overhead", "max-autotune")


@dataclass(frozen=True)
class AdaptationSpec:
    """The trainable part of the model."""

    name: str = setting("lora", "full, head, top_layers, lora, ffa_lora, prompt or side_adapter", choices=ADAPTATIONS)
    rank: int = setting(8, "lora, side_adapter: rank r", ge=1, le=65_536)  # no layer is as wide as the upper bound
    alpha: float | None = setting(
        None, "lora: scale is alpha / rank [2 rank; rank for task zero_shot]", gt=0, finite=True
    )
    dropout: float = setting(0.0, "lora: dropout on the adapter's input; the model's own dropout is off", ge=0, lt=1)
    targets: tuple[str, ...] | None = setting(
        None,
        'lora: names of modules and of parameters of experts, or "all-linear": all linear maps of the blocks, and '
        "experts [queries and values; both maps of every MLP for task zero_shot]",
        metadata={"alone": ALL_LINEAR},
    )
    dora: bool = setting(False, "lora: also learn the norm of each output's weights (DoRA, arXiv 2402.09353)")
    rank_pattern: dict[str, int] | None = setting(
        None,
        "lora: other ranks, by the end of a module's name, e.g. { fc2 = 16 }",
        ge=1,
        le=65_536,
        keys=MODULE,
        most=512,
        words="at most 512 ends of modules' names, not expressions, each with a whole number from 1 to 65536",
    )
    alpha_pattern: dict[str, float] | None = setting(
        None,
        "lora: other alphas, by the end of a module's name, e.g. { fc2 = 32 }",
        gt=0,
        finite=True,
        keys=MODULE,
        most=512,
        words="at most 512 ends of modules' names, not expressions, each with a finite number above 0",
    )
    exclude_modules: tuple[str, ...] | None = setting(
        None, 'lora: targets that are not adapted, by the end of a module\'s name, e.g. with targets = "all-linear"'
    )
    bias: str = setting(
        "none", "lora: none; PEFT's all and lora_only are refused: they train biases of the base", choices=BIASES
    )
    init_lora_weights: str = setting(
        "default",
        "lora: initial values of A: default (or true), as in PEFT, or gaussian; B starts at zero; others are refused",
        choices=STARTS,
        metadata={"true": "default", "false": "random"},
    )
    rslora: bool = setting(False, "lora: scale is alpha / sqrt(rank) (rsLoRA, arXiv 2312.03732)")
    layers: int | None = setting(None, "number of last blocks that top_layers trains, or that lora adapts", ge=1)
    tokens: int = setting(16, "prompt: number of learned vectors before the class name, for task zero_shot", ge=1)
    released: str = setting(
        "class",
        "side_adapter: the part of each block's output that it reads: class (the class token, or the tokens' mean), "
        "grid (also the means of the four quadrants), tokens (all tokens, projected)",
        choices=RELEASED,
    )
    projection: int = setting(32, 'side_adapter, released = "tokens": length of a projected token', ge=1, le=65_536)


@dataclass(frozen=True)
class ModelSpec(OpenSettings):
    """The foundation model, its task and its trainable part."""

    name: str = setting(
        "",
        'built in ("nano-vit"; `fedfm list models`), a folder, a hub id, or "features"',
        required=True,
        words='"nano-vit", a folder, a hub id, or "features"',
    )
    weights: str = setting("pretrained", "pretrained or random", choices=("pretrained", "random"))
    fingerprint: str | None = setting(
        None,
        "SHA-256 of the starting weights, as `fedfm check` prints it; the server and every silo refuse another model",
        pattern=r"[0-9a-f]{64}",
        words="64 hexadecimal digits",
    )
    options: dict[str, Any] | None = setting(
        None, "random weights: keys of config.json to change, e.g. { num_hidden_layers = 2 }"
    )
    task: str | None = setting(
        None,
        f"{', '.join(tasks.names())} [implied by the data]",
        choices=tasks.names(),
    )
    adaptation: AdaptationSpec | None = setting(
        None, "the trainable part; the model's own dropout is off in training [lora; head for features]"
    )
    max_length: int = setting(128, "largest number of tokens of a row", ge=2)
    attention: str | None = setting(
        None,
        "how attention is computed: eager, sdpa, flash_attention_2, flex_attention [transformers' choice]",
        choices=ATTENTION,
    )
    compile: str | None = setting(
        None,
        "torch.compile of the blocks: true, or a mode: default, reduce-overhead, max-autotune; equal within rounding",
        choices=COMPILES,
        metadata={"true": "default"},
    )
    quantization: str | None = setting(
        None,
        "frozen linear maps in 4 bits (nf4, also experts) or 8 bits (int8), by bitsandbytes (install the extra "
        "[quantized]); their products are computed in dtype",
        choices=QUANTIZATIONS,
    )
    gradient_checkpointing: bool = setting(
        False, "training keeps only the inputs of blocks and computes the blocks twice: less memory, a third slower"
    )
    device: str = setting(
        "auto",
        "auto, cpu, cuda, mps, or auto-map: accelerate spreads the model's layers over all GPUs of the machine",
        pattern="auto-map|(auto|cpu|cuda|mps)(:.*)?",
        words='"auto", "cpu", "cuda", "mps" or "auto-map"',
    )
    dtype: str = setting(
        "float32",
        "dtype of frozen weights and products; trained weights are float32. float16 trains only head and side_adapter",
        choices=_NUMBERS,
    )

    @classmethod
    def own_keys(cls, values: Mapping[str, Any]) -> dict[str, Setting]:
        """The keys of the task that ``values`` name."""
        named = values.get("task")
        return tasks.model_settings(tasks.find(named)) if isinstance(named, str) and named in tasks.names() else {}

    @classmethod
    def setting_of(cls, key: str) -> Setting | None:
        return tasks.model_settings().get(key)

    @classmethod
    def all_keys(cls) -> dict[str, Setting]:
        return tasks.model_settings()
