"""Reads a model's configuration from its folder, and adapts it to fedfm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedfm.errors import InputError, close
from fedfm.models import quantised_maps, refusals
from fedfm.models.locate import ADAPTER, PREACT_RESNET, no_whole_model, stored_file
from fedfm.models.spec import ModelSpec

# The settings that decide what a forward pass returns.
_OUTPUT = {"return_dict": True, "output_attentions": False, "output_hidden_states": False}
OF_EXPERTS = "output_router_logits"  # for a loss that balances experts, which is not trained; it fails in generation


def read(path: Path | str, spec: ModelSpec) -> Any:
    """The configuration of a model, changed by ``model.options``; its output flags get the values that fedfm needs.

    Raises:
        InputError: the file cannot be read, it belongs to an adapter, or the options do not fit.
    """
    from transformers import AutoConfig

    if _is_preact_resnet(path):
        import fedfm.models.architectures.preact_resnet  # noqa: F401 - registers it with transformers

    # If the folder has an adapter, transformers would read the weights of the adapter's base instead of the folder's
    # own. It would also put the adapter into the model, which our own adaptation does not expect.
    if spec.weights != "random" and stored_file(path, ADAPTER) is not None:
        raise no_whole_model(spec.name)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise refusals.refusal(path, spec.name, error) from None
    for part in _parts(config):
        for key, value in _OUTPUT.items():
            setattr(part, key, value)
        if getattr(part, OF_EXPERTS, False):
            setattr(part, OF_EXPERTS, False)
    if quantised_maps.settings(config) is not None:
        from fedfm.models import stored_formats

        stored_formats.prepare(config, spec.name, random=spec.weights == "random")
    return _with_options(config, spec.options) if spec.options else config


def _is_preact_resnet(path: Path | str) -> bool:
    """Whether a configuration names our own residual network, even if the file is damaged."""
    found = stored_file(path, "config.json")
    return found is not None and PREACT_RESNET.encode() in found.read_bytes()


def class_names(config: Any) -> tuple[str, ...]:
    """The configuration's names for the outputs of a head; () if an output has no name."""
    named = getattr(config, "id2label", None) or {}
    return tuple(str(named[i]) for i in range(len(named))) if set(named) == {*range(len(named))} else ()


def name_classes(config: Any, classes: Sequence[str], problem_type: str | None) -> None:
    """Write the names of the classes and the kind of the head into the configuration.

    The checkpoint's configuration may state that its head was a regression, or that its classes have independent
    probabilities. Without this, transformers' pipelines would treat the new head as such a head.

    Args:
        problem_type: transformers' name for the kind of the head, e.g. ``single_label_classification``; None removes
            the kind.
    """
    config.id2label, config.label2id = dict(enumerate(classes)), {c: i for i, c in enumerate(classes)}
    config.problem_type = problem_type


def keep_weights(config: Any) -> None:
    """Stop the model from rescaling its own weights.

    Before an evaluation, RWKV divides some of its weights in place, so that float16 does not overflow. It does not
    divide the values that an adapter adds to these weights. A program that loads the divided weights would divide them
    again. The outputs are the same without the division.
    """
    if getattr(config, "rescale_every", 0):
        config.rescale_every = 0


def _parts(config: Any) -> Iterator[Any]:
    """A configuration and the configurations inside it, e.g. of a text and a vision encoder."""
    yield config
    for name in getattr(config, "sub_configs", ()):
        if (part := getattr(config, name, None)) is not None:
            yield from _parts(part)


def _with_options(config: Any, options: Mapping[str, Any]) -> Any:
    """A new configuration with these keys changed, and with all values that depend on them computed again.

    Raises:
        InputError: the configuration has no such key, or refuses the value.
    """
    table = config.to_dict()
    known = sorted(k for k in table if not k.startswith("_") and k not in ("model_type", "architectures"))
    for key, value in options.items():
        if key not in known:
            hint = close(key, known) or f": it has {', '.join(known)}"
            raise InputError(f"model.options.{key}: no key of a configuration of type {config.model_type!r}{hint}")
        old = table[key]
        number = isinstance(old, (int, float)) and isinstance(value, (int, float))
        same = number if type(old) is not bool else type(value) is bool
        kind = list if isinstance(old, tuple) else type(old)
        if old is not None and not same and not isinstance(value, kind):
            raise InputError(f"model.options.{key} = {value!r}: expected something like {old!r}")
    try:
        return type(config)(**{**table, **options})
    except Exception as error:  # the library's error classes differ between releases
        raise InputError(f"model.options: {refusals.first_of(error)}") from None
