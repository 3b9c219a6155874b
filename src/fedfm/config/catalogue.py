"""What is there, read from the sources without importing them: `fedfm list` and `fedfm show` answer at once."""

from __future__ import annotations

import ast
import functools
import json
from importlib.resources import files
from typing import Any

from fedfm.config.registry import available
from fedfm.errors import InputError

_KINDS = {
    "methods": "methods",
    "sources": "data.sources",
    "attacks": "attacks",
    "aggregation": "aggregation",
}
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
    blocks = []
    for name in [kind] if kind else ["methods", "models", "partitions", "sources", "attacks", "aggregation"]:
        rows = {"models": _MODELS, "partitions": _PARTITIONS}.get(name) or {
            entry: _headline(module) for entry, module in available(_KINDS[name]).items()
        }
        width = max(map(len, rows))
        blocks.append("\n".join([f"{name}:", *(f"  {entry:<{width}}  {text}" for entry, text in rows.items())]))
    return "\n\n".join(blocks)


def _source(module: str) -> str:
    root, *parts = module.split(".")  # what lies between would be imported, and torch with it
    for path in ((*parts[:-1], f"{parts[-1]}.py"), (*parts, "__init__.py")) if parts else ():
        try:
            return files(root).joinpath(*path).read_text(encoding="utf-8")
        except (FileNotFoundError, ModuleNotFoundError, NotADirectoryError):
            continue
    return ""


@functools.lru_cache
def _tree(module: str) -> ast.Module:
    """The module's syntax tree; parsing is what `fedfm show` spends its time on."""
    return ast.parse(_source(module))


def _headline(module: str) -> str:
    """The first paragraph of what a file says of itself; parsing files would take most of the command's time."""
    begun, quotes, rest = _source(module.partition(":")[0]).partition('"""')
    if begun or not quotes:
        return module
    return " ".join(rest.partition('"""')[0].partition("\n\n")[0].split())


def method(name: str) -> str:
    """The paper, description, and keys with types, defaults and meaning of a method, an attack or an aggregation.

    Raises:
        InputError: none has that name.
    """
    kinds = {"methods": "method", "attacks": "attack", "aggregation": "aggregation"}
    where = {kind: available(kind) for kind in kinds}
    kind = next((kind for kind, names in where.items() if name in names), None)
    if kind is None:
        import difflib

        near = difflib.get_close_matches(name, [n for names in where.values() for n in names], 1)
        raise InputError(
            f'no method, attack or aggregation is called "{name}"'
            + (f'; did you mean "{near[0]}"?' if near else "")
            + "; see `fedfm list`"
        )
    module = where[kind][name].partition(":")[0]
    tree = _tree(module)
    rows = _fields(module, None)
    lines = [ast.get_docstring(tree) or "", "", _describe(tree), "", f"[{kinds[kind]}]", f'name = "{name}"']
    lines += _keys({key: text for key, text in rows.items() if key not in ("local", "head", "base")})
    if "local" in rows:
        optimisers, common = _optimisers(), _fields("fedfm.training", "SGD")
        imports = [alias for part in tree.body if isinstance(part, ast.ImportFrom) for alias in part.names]
        usual = rows["local"][0].partition("(")[0]  # the class of the method's default
        usual = next((alias.name for alias in imports if alias.asname == usual), usual)
        named = {cls: optimiser for optimiser, cls in optimisers.items()}
        lines += ["", "# The model's own dropout is off in training; LoRA's is model.adaptation.dropout."]
        lines += [f"[method.local]  # the client optimiser: {', '.join(optimisers)}", f'name = "{named[usual]}"']
        lines += _keys(_fields("fedfm.training", usual))
        for optimiser, cls in optimisers.items():
            more = {key: row for key, row in _fields("fedfm.training", cls).items() if key not in common}
            if more and cls != usual:
                lines += ["", f'name = "{optimiser}"  # also takes', *_keys(more)]
    if "base" in rows:
        lines += ["", f"[method.base]  # {rows['base'][1]}: `fedfm show fedprox`", 'name = "fedavg"']
    if "head" in rows:
        lines += ["", f"[method.head]  # {rows['head'][1]}", *_keys(_fields("fedfm.training.fit_head", "HeadSpec"))]
    return "\n".join(lines)


def _optimisers() -> dict[str, str]:
    """Names of the client optimisers and of their classes."""
    for node in _tree("fedfm.training").body:
        if (
            isinstance(node, ast.AnnAssign)
            and ast.unparse(node.target) == "BY_NAME"
            and isinstance(node.value, ast.Dict)
        ):
            pairs = zip(node.value.keys, node.value.values, strict=True)
            return {ast.literal_eval(key): ast.unparse(cls) for key, cls in pairs if key is not None}
    return {}


def _keys(rows: dict[str, tuple[str, str]]) -> list[str]:
    """Lines of TOML, each with its meaning."""
    width = max((len(f"{key} = {default}") for key, (default, _) in rows.items()), default=0)
    return [f"{f'{key} = {default}':<{width}}  # {text}" for key, (default, text) in rows.items()]


def _toml(value: ast.expr) -> str:
    """A default as TOML has it."""
    text = ast.unparse(value).replace("'", '"')
    return {"True": "true", "False": "false", "()": "[]", "dict": "{}"}.get(text, text)


def _describe(tree: ast.Module) -> str:
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return (ast.get_docstring(classes[-1]) or "") if classes else ""


def _fields(module: str, name: str | None) -> dict[str, tuple[str, str]]:
    """Key -> (default, meaning) of a dataclass, its bases' first; the last class of the module where no name is
    given.
    """
    tree = _tree(module)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    imported = {
        alias.name: part.module
        for part in tree.body
        if isinstance(part, ast.ImportFrom)
        and part.module
        and part.module.startswith(("fedfm.methods", "fedfm.attacks", "fedfm.aggregation", "fedfm.training"))
        for alias in part.names
    }
    if name and name not in classes:
        return _fields(imported[name], name)
    node = classes[name] if name else list(classes.values())[-1]
    rows: dict[str, tuple[str, str]] = {}
    for base in node.bases:
        parent = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(parent, ast.Name):
            if parent.id in imported:
                rows |= _fields(imported[parent.id], parent.id)
            elif parent.id in classes:
                rows |= _fields(module, parent.id)
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and isinstance(item.value, ast.Call):
            keywords: dict[str, Any] = {k.arg or "": k.value for k in item.value.keywords}
            value = keywords.get("default", keywords.get("default_factory"))
            if value is not None:
                told = ast.literal_eval(keywords["metadata"]) if "metadata" in keywords else {}
                default = json.dumps(told["usual"]) if "usual" in told else _toml(value)
                rows[item.target.id.removesuffix("_")] = (default, told.get("help", ""))
    return rows
