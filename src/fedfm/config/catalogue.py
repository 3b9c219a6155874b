"""Texts for `fedfm list` and `fedfm show`, made from sources and the shipped schema, without an import of torch."""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import MISSING, is_dataclass
from importlib.resources import files
from typing import Any

from fedfm.config.paper_names import how_to_set
from fedfm.config.registry import admit, admit_any, available, ours, resolve
from fedfm.core.fields import describe, is_required, settings_of
from fedfm.errors import InputError, close

SCHEMAS = ("experiment", "pretrain", "distil", "silo", "federation")  # files that have a JSON Schema
_TAKES = "`fedfm show` takes a method, a task, an attack or an aggregation"
_TITLES = {"methods": "method", "attacks": "attack", "aggregation": "aggregation"}  # tables of an experiment, by kind
_PARTITIONS = {
    "iid": "rows assigned evenly at random",
    "dirichlet": "the clients' shares of each class are drawn from Dir(alpha); small alpha = skewed",
    "by_class": "every client holds classes_per_client classes",
    "by_column": "one client per value of a column; with clients = N each value's rows are split evenly",
    "flower": "a partitioner of flwr-datasets, named by its class, with its options",
}
_MODELS = {
    "nano-vit": "built in: 32 x 32 ViT, 1.1 M parameters, pretrained on CIFAR-10 and Fashion-MNIST",
    "nano-vit-fhe": "built in: nano-vit with polynomials, for encrypted rows (method blindfed)",
    "nano-clip": "built in: 80 x 80 CLIP for task zero_shot, 3.6 M parameters, distilled from a small CLIP",
    "preact-resnet": "built in, no weights: pre-activation ResNet 64-128-256-512, 32 x 32, 11.2 M parameters",
    "preact-resnet-small": "built in, no weights: the same, 16-32-64 with one block a section, 78 k parameters",
    "vit-b16": "built in, no weights: ViT-B/16, 224 x 224, 86 M parameters",
    "nano-gpt2": "built in, no weights: GPT-2 of width 64, 2 layers, 4 heads, on bytes, 133 k parameters",
    "features": "a linear head on feature vectors",
    "<folder or hub id>": "ViT, DeiT, DINOv2, CLIP, BERT-like, GPT-2, LLaMA, MobileNet in safetensors; CIFAR ResNets",
}


def listing(kind: str | None = None) -> str:
    """Names with one line each, of one kind or of all kinds."""
    blocks = []
    for name in [kind] if kind else ["methods", "tasks", "models", "partitions", "sources", "attacks", "aggregation"]:
        rows = _rows(name)
        width = max(map(len, rows))
        blocks.append("\n".join([f"{name}:", *(f"  {entry:<{width}}  {text}" for entry, text in rows.items())]))
    return "\n\n".join(blocks)


def _rows(kind: str) -> dict[str, str]:
    """The names of a kind, with one line each."""
    found = {"models": _MODELS, "partitions": _PARTITIONS}.get(kind)
    return found or {entry: _headline(module) for entry, module in _modules(kind).items()}


def _modules(kind: str) -> dict[str, str]:
    """The module of each name of a kind."""
    if kind == "tasks":
        from fedfm.core import tasks

        return {name: f"fedfm.tasks.{name}" for name in tasks.names()}
    return available("data.sources" if kind == "sources" else kind)


def _source(module: str) -> str:
    root, *parts = module.split(".")  # only the root is imported: packages below it may import torch
    for path in ((*parts[:-1], f"{parts[-1]}.py"), (*parts, "__init__.py")) if parts else ():
        try:
            return files(root).joinpath(*path).read_text(encoding="utf-8")
        except (FileNotFoundError, ModuleNotFoundError, NotADirectoryError):
            continue
    return ""


def _headline(module: str) -> str:
    """The first paragraph of a module's docstring."""
    begun, quotes, rest = _source(module.partition(":")[0]).partition('"""')
    if begun or not quotes:
        return module
    return " ".join(rest.partition('"""')[0].partition("\n\n")[0].split())


def show(name: str) -> str:
    """What ``fedfm show`` prints: :func:`method`, or a task with its own keys; both if both have the name.

    Raises:
        InputError: nothing has that name, or what has it has no keys of its own.
    """
    from fedfm.core import tasks

    if name not in tasks.names():
        if not how_to_set(name) and not any(name in available(kind) for kind in _TITLES):
            for kind in ("models", "partitions", "sources"):
                if text := _rows(kind).get(name):
                    raise InputError(f'"{name}" is one of the {kind}: {text.rstrip(".")}; {_TAKES}')
        return method(name)
    return "\n\n".join([*([method(name)] if name in available("methods") else []), _task(name)])


def _task(name: str) -> str:
    """A task as valid TOML: its headline, its columns and its keys."""
    from fedfm.core import tasks

    task, known = tasks.find(name), schema("experiment")["properties"]
    own = {
        key: known["model"]["properties"].get(key) or {"description": describe(f, hint)}
        for key, f, hint in settings_of(type(task))
    }
    columns = {column.key: {"description": column.help} for column in task.columns}
    lines = [_comment(_headline(f"fedfm.tasks.{name}")), ""]
    if columns:
        lines += ["[data]", *_lines(columns), ""]
    return "\n".join([*lines, "[model]", f'task = "{name}"', *_lines(own)])


def method(name: str) -> str:
    """A method, an attack or an aggregation as valid TOML, with its paper, description, keys, defaults and meanings.

    Raises:
        InputError: nothing has that name.
    """
    where = {kind: available(kind) for kind in _TITLES}
    from fedfm.core import tasks

    kind = next((kind for kind, names in where.items() if name in names), "")
    if ":" in name:
        kind = admit_any(name, "method")
    if not kind:
        near = how_to_set(name) or close(name, [*(n for names in where.values() for n in names), *tasks.names()])
        raise InputError(
            f'no method, task, attack or aggregation is called "{name}"{near}; see `fedfm list`. '
            'A class of your own has the name "module:Class"'
        )
    defs = schema("experiment")["$defs"]
    if ":" in where[kind].get(name, name):  # code from outside fedfm: a user who names it here allows its import
        admit(kind, name, "method")
        keys = _foreign(resolve(kind, name))
    else:
        keys = _variants(defs[kind])[name]
    own = {key: found for key, found in keys["properties"].items() if key != "name"}
    inner = {key: own.pop(key) for key in ("local", "head", "base") if _is_table(own.get(key, {}))}
    lines = [_comment(keys.get("description", "")), "", f"[{_TITLES[kind]}]", f'name = "{name}"', *_lines(own)]
    if local := inner.get("local"):
        optimisers, usual = _variants(defs["optimisers"]), local["default"]["name"]
        lines += ["", "# The model's own dropout is off in training; LoRA's is model.adaptation.dropout."]
        lines += [f"[method.local]  # the client optimiser: {', '.join(optimisers)}", f'name = "{usual}"']
        lines += _lines(_with_defaults(_but_name(optimisers[usual]), local["default"]))
        for other, found in optimisers.items():
            more = {k: v for k, v in _but_name(found).items() if k not in optimisers["sgd"]["properties"]}
            if more and other != usual:
                also = _comment("\n".join(_lines(more)))  # comments, as a table may have a key only once
                lines += ["", f'# name = "{other}" also takes', also]
    if base := inner.get("base"):
        lines += ["", f"[method.base]  # {base['description']}: `fedfm show fedprox`"]
        lines += [f'name = "{base["default"]["name"]}"']
    if head := inner.get("head"):
        lines += ["", f"[method.head]  # {head['description']}", *_lines(head["properties"])]
    if rows := keys.get("x-paper"):
        lines += ["", "# These defaults differ from the paper:", *(_comment(f"  {_difference(row)}") for row in rows)]
    return "\n".join(lines)


def _difference(row: dict[str, Any]) -> str:
    """One default that is not the paper's."""
    return f"{row['key']} = {value(row['default'])}, in the paper {value(row['paper'], bare=True)}: {row['why']}"


def value(of: Any, *, bare: bool = False) -> str:
    """A default or a paper's value as TOML writes it; "none" if there is none.

    Args:
        bare: whether to omit the quotes of a text of several words, which describes the paper and is not a valid value.
    """
    return "none" if of is None else of if bare and isinstance(of, str) and " " in of else json.dumps(of)


def _is_table(found: dict[str, Any]) -> bool:
    """Whether a key is an inner table."""
    return "properties" in found or isinstance(found.get("default"), dict)


def _with_defaults(keys: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    """Keys with the defaults that a table gives them."""
    return {key: found | {"default": table[key]} if key in table else found for key, found in keys.items()}


def _foreign(cls: type) -> dict[str, Any]:
    """Schema of a class from outside fedfm; the docstrings of its module and of the class describe it."""
    from fedfm.config.papers import differences  # both import torch, which the class has imported, too
    from fedfm.config.toml import plain_or_name

    keys: dict[str, dict[str, Any]] = {}
    for key, f, hint in settings_of(cls):
        keys[key] = {"description": describe(f, hint)}
        default = f.metadata.get("usual", f.default if f.default_factory is MISSING else f.default_factory())
        if isinstance(default, (bool, int, float, str, tuple)) and default != "" and not is_required(f):
            keys[key]["default"] = default
        elif key == "head" and is_dataclass(default):
            keys[key]["properties"] = _with_defaults(_foreign(type(default))["properties"], plain_or_name(default))
        elif key in ("local", "base") and is_dataclass(default) and "name" in (table := plain_or_name(default)):
            keys[key]["default"] = table
    itself = "" if (cls.__doc__ or "").startswith(f"{cls.__name__}(") else inspect.getdoc(cls)  # @dataclass wrote it
    about = "\n\n".join(filter(None, (inspect.getdoc(sys.modules[cls.__module__]), itself)))
    return {"description": about, "properties": keys, "x-paper": differences(cls)}


def schema(which: str) -> dict[str, Any]:
    """The JSON Schema of a file. The schema of an experiment includes the names of installed entry points."""
    path = files("fedfm.config").joinpath("schemas", f"{which}.json")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for kind in ("methods", "attacks", "aggregation") if which == "experiment" else ():
        for name in sorted(available(kind).keys() - set(ours(kind))):
            own = {"type": "object", "properties": {"name": {"const": name}}, "required": ["name"]}
            found["$defs"][kind]["oneOf"].append(own)
    return found


def _variants(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Variants of a table by name; variants from outside fedfm are left out."""
    named = [(v["properties"]["name"], v) for v in schema["oneOf"]]
    return {name["const"]: variant for name, variant in named if "const" in name}


def _but_name(schema: dict[str, Any]) -> dict[str, Any]:
    return {key: found for key, found in schema["properties"].items() if key != "name"}


def _comment(text: str) -> str:
    return "\n".join(f"# {line}".rstrip() for line in text.splitlines())


def _lines(keys: dict[str, Any]) -> list[str]:
    """TOML lines, each with its meaning; a key without a default is a comment."""
    rows = {
        f"{key} = {json.dumps(found['default'], ensure_ascii=False)}" if "default" in found else f"# {key} = ...": found
        for key, found in keys.items()
    }
    width = max(map(len, rows), default=0)
    return [f"{row:<{width}}  # {found['description']}" for row, found in rows.items()]
