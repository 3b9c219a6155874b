"""What there is: `fedfm list` and `fedfm show`.

Both answer at once, from a file that `docs/generate.py` writes of the dataclasses; reading these would import torch.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from fedfm.config.registry import admit, available, resolve
from fedfm.errors import InputError, close

Keys = dict[str, str]  # a line of TOML -> its meaning

_TABLES = {"methods": "method", "attacks": "attack", "aggregation": "aggregation"}  # kind -> of an experiment
_PARTITIONS = {
    "iid": "rows dealt evenly at random",
    "dirichlet": "each class's shares over clients drawn from Dir(alpha); small alpha = skewed",
    "by_class": "every client holds classes_per_client classes",
    "by_column": "a client per value of a column; with clients = N each value's rows are dealt evenly",
    "flower": "a partitioner of flwr-datasets by its class, with its options",
}
_MODELS = {
    "nano-vit": "built in: 32 x 32 ViT, 1.1 M parameters, pretrained on CIFAR-10 and Fashion-MNIST",
    "preact-resnet": "built in, no weights: pre-activation ResNet 64-128-256-512, 32 x 32, 11.2 M parameters",
    "preact-resnet-small": "built in, no weights: the same, 16-32-64 with one block a section, 78 k parameters",
    "vit-b16": "built in, no weights: ViT-B/16, 224 x 224, 86 M parameters",
    "nano-gpt2": "built in, no weights: GPT-2 of width 64, 2 layers, 4 heads, on bytes, 133 k parameters",
    "features": "a linear head on feature vectors",
    "<folder or hub id>": "ViT, DeiT, DINOv2, CLIP, BERT-like, GPT-2, LLaMA, MobileNet in safetensors; CIFAR ResNets",
}


def listing(kind: str | None = None) -> str:
    """Names with one line each, of one kind or all."""
    known = _known()
    blocks = []
    for name in [kind] if kind else ["methods", "models", "partitions", "sources", "attacks", "aggregation"]:
        rows = {"models": _MODELS, "partitions": _PARTITIONS, "sources": known["sources"]}.get(name) or {
            entry: _headline(known[name][entry]["about"]) if ":" not in where else where
            for entry, where in available(name).items()
        }
        width = max(map(len, rows))
        blocks.append("\n".join([f"{name}:", *(f"  {entry:<{width}}  {text}" for entry, text in rows.items())]))
    return "\n\n".join(blocks)


def method(name: str) -> str:
    """The paper, description, and keys with defaults and meaning of a method, an attack or an aggregation.

    Raises:
        InputError: none has that name.
    """
    known, where = _known(), {kind: available(kind) for kind in _TABLES}
    kind = next((kind for kind, names in where.items() if name in names), None)
    if kind is None:
        near = close(name, [n for names in where.values() for n in names])
        raise InputError(f'no method, attack or aggregation is called "{name}"{near}; see `fedfm list`')
    if ":" in where[kind][name]:  # of another package
        admit(kind, name, "name")
        told = described(kind, name)
    else:
        told = known[kind][name]
    lines = [told["about"], "", f"[{_TABLES[kind]}]", f'name = "{name}"', *_lines(told["keys"])]
    if "local" in told:
        common = {line.partition(" = ")[0] for line in known["local"]["sgd"]}
        lines += ["", "# The model's own dropout is off in training; LoRA's is model.adaptation.dropout."]
        lines += [f"[method.local]  # the client optimiser: {', '.join(known['local'])}", f'name = "{told["local"]}"']
        lines += _lines(known["local"][told["local"]])
        for optimiser, keys in known["local"].items():
            more = {line: text for line, text in keys.items() if line.partition(" = ")[0] not in common}
            if more and optimiser != told["local"]:
                lines += ["", f'name = "{optimiser}"  # also takes', *_lines(more)]
    if "base" in told:
        lines += ["", f"[method.base]  # {told['base']}: `fedfm show fedprox`", 'name = "fedavg"']
    if "head" in told:
        lines += ["", f"[method.head]  # {told['head']}", *_lines(known["head"])]
    return "\n".join(lines)


def _known() -> dict[str, Any]:
    return json.loads(files("fedfm.config").joinpath("catalogue.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def _headline(text: str) -> str:
    return " ".join(text.partition("\n\n")[0].split())


def _lines(keys: Keys) -> list[str]:
    width = max(map(len, keys), default=0)
    return [f"{line:<{width}}  # {text}" for line, text in keys.items()]


# --- what the file holds; these import the classes --------------------------------------------------------------------


def everything() -> dict[str, Any]:
    """The content of the file."""
    from importlib import import_module

    from fedfm.training import BY_NAME
    from fedfm.training.fit_head import HeadSpec

    found: dict[str, Any] = {
        kind: {name: described(kind, name) for name, where in available(kind).items() if ":" not in where}
        for kind in _TABLES
    }
    sources = available("data.sources").items()
    found["sources"] = {name: _headline(str(import_module(where).__doc__)) for name, where in sources}
    return found | {"local": {name: _keys(cls) for name, cls in BY_NAME.items()}, "head": _keys(HeadSpec)}


def described(kind: str, name: str) -> dict[str, Any]:
    """What ``fedfm show`` tells of a class: ``about``, ``keys``, the name of its optimiser, what its tables are."""
    import inspect
    import sys
    from dataclasses import fields

    from fedfm.training import BY_NAME

    cls = resolve(kind, name)
    paper, text = (inspect.cleandoc(doc or "") for doc in (sys.modules[cls.__module__].__doc__, cls.__doc__))
    tables = {f.name: f for f in fields(cls) if f.name in ("local", "base", "head")}
    found = {"about": f"{paper}\n\n{text}", "keys": _keys(cls, tuple(tables))}
    found |= {key: f.metadata["help"] for key, f in tables.items()}
    if "local" in tables:
        found["local"] = next(n for n, optimiser in BY_NAME.items() if optimiser is type(tables["local"].default))
    return found


def _keys(cls: Any, without: tuple[str, ...] = ()) -> Keys:
    """Of a dataclass; a key without a default is a comment."""
    from dataclasses import MISSING, fields

    from fedfm.config.toml import key_of

    found = {}
    for f in fields(cls):
        default = f.default if f.default_factory is MISSING else f.default_factory()
        value = f.metadata.get("usual", default)
        if f.init and f.name not in without and value is not MISSING:
            line = f"# {key_of(f.name)} =" if value is None else f"{key_of(f.name)} = {json.dumps(value)}"
            found[line] = str(f.metadata.get("help", ""))
    return found
