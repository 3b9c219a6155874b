"""Make JSON Schemas of the files that users write from the settings dataclasses; docs/generate.py writes the schemas.

A schema states every rule on a single value. ``fedfm check`` also applies the rules between tables
(:mod:`fedfm.config.compatibility`), and looks for files and models on the machine. A table with a ``name`` is a
``oneOf`` over the names: the TOML plugins of editors complete keys from a ``oneOf``, and ignore ``if``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from dataclasses import MISSING, Field, is_dataclass, replace
from typing import Any, get_args, get_origin

from fedfm.config.papers import differences
from fedfm.config.registry import name_of, ours, resolve
from fedfm.config.run_spec import RunSpec
from fedfm.core.capabilities import HiddenModel
from fedfm.core.fields import bounds_of, describe, is_required, owners_of, plain_type, settings_of
from fedfm.core.method import Method
from fedfm.data.spec import DataSpec
from fedfm.methods.fedavg import FedAvg
from fedfm.models.spec import ModelSpec
from fedfm.privacy.spec import PrivacySpec
from fedfm.training import Local

Schema = dict[str, Any]
_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean"}
_ENDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_CLASS = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
_NAME = {"type": "string", "description": "Name of the run.", "maxLength": 200, "pattern": r"^[^/\\]*[^/\\\s][^/\\]*$"}


def experiment() -> Schema:
    """The schema of an experiment, as :meth:`Experiment.from_dict` takes it."""
    usual = {"methods": "", "attacks": "", "aggregation": "mean", "optimisers": "sgd"}
    kinds = {kind: {name: resolve(kind, name) for name in ours(kind)} for kind in usual}
    defs = {kind: variants_by_name(classes, usual[kind], open=kind != "optimisers") for kind, classes in kinds.items()}
    averaging = {name: cls for name, cls in kinds["methods"].items() if issubclass(cls, FedAvg)}
    defs["base"] = variants_by_name(averaging, "fedavg", open=True)
    tables = {"name": _NAME, "data": table(DataSpec), "model": table(ModelSpec), "method": _ref("methods")}
    tables |= {"attack": _ref("attacks"), "aggregation": _ref("aggregation"), "privacy": _privacy()}
    made = document("an experiment of fedfm", tables | {"run": table(RunSpec)}, ("data", "method"), defs)
    hiding = [name for name, cls in kinds["methods"].items() if issubclass(cls, HiddenModel)]
    hidden = {"properties": {"method": {"properties": {"name": {"enum": hiding}}}}}
    return made | {"oneOf": [{"required": ["model"], "not": hidden}, {"not": {"required": ["model"]}} | hidden]}


def pretraining(spec: type) -> Schema:
    """The schema of a pretraining, whose [pretrain] table is ``spec``."""
    return _central("pretraining", "pretrain", spec, {"optimisers": experiment()["$defs"]["optimisers"]})


def distillation(spec: type) -> Schema:
    """The schema of a distillation, whose [distil] table is ``spec``."""
    return _central("distillation", "distil", spec, {})


def _central(noun: str, key: str, spec: type, defs: Schema) -> Schema:
    """The schema of a training on one machine: [data], [model] and the table ``key``."""
    whole = experiment()["properties"]
    tables = {name: whole[name] for name in ("data", "model")} | {key: table(spec)}
    return document(f"a {noun} of fedfm", tables, ("data", "model"), defs)


def document(title: str, properties: Schema, required: Iterable[str], defs: Schema) -> Schema:
    """The schema of a file with these tables."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}
    return head | _table(properties, required) | {"additionalProperties": False} | ({"$defs": defs} if defs else {})


def _privacy() -> Schema:
    """The schema of [privacy]: all keys that an epsilon needs, or secure aggregation alone."""
    made = table(PrivacySpec)
    alone = {"required": ["aggregator"], "properties": {"aggregator": {"const": "secagg"}}, "maxProperties": 1}
    return made | {"required": [], "anyOf": [{"required": made["required"]}, alone]}


def table(cls: type) -> Schema:
    """The schema of a settings dataclass."""
    found = list(settings_of(cls))
    if any(owners_of(f) for _, f, _ in found):  # some keys go with some names only
        (name,) = (f for key, f, _ in found if key == "name")
        variants = [_variant(other, found, other == name.default, "") for other in bounds_of(name).choices]
        return {"description": _sentence(cls), "oneOf": variants}
    required = [key for key, f, _ in found if is_required(f)]
    made = _table({key: _property(f, hint) for key, f, hint in found}, required, _sentence(cls))
    if one_of := getattr(cls, "one_of", ()):
        made["oneOf"] = [{"required": [key]} for key in one_of]
    return made | {"additionalProperties": False}


def variants_by_name(classes: dict[str, type], usual: str, *, open: bool) -> Schema:
    """The schema of a table whose ``name`` is one of these classes' names.

    Args:
        usual: the default of ``name``.
        open: whether ``name`` may also be ``module:Class``.
    """
    variants = [
        _variant(name, settings_of(cls), name == usual, _about(cls))
        | ({"x-paper": rows} if (rows := differences(cls)) else {})
        for name, cls in classes.items()
    ]
    if open:
        variants.append(_table({"name": {"type": "string", "pattern": _CLASS}}, ["name"], "A class as module:Class."))
    return {"oneOf": variants}


def _variant(name: str, found: Iterable[tuple[str, Field[Any], Any]], usual: bool, about: str) -> Schema:
    """The schema of a table with one ``name``."""
    mine = [(key, f, hint) for key, f, hint in found if name in (owners_of(f) or (name,)) and key != "name"]
    required = ([] if usual else ["name"]) + [key for key, f, _ in mine if is_required(f)]
    keys = {"name": {"const": name}} | {key: _property(f, hint) for key, f, hint in mine}
    return _table(keys, required, about) | {"additionalProperties": False}


def _about(cls: type) -> str:
    """The docstrings of the module and of the class."""
    return "\n\n".join(filter(None, [inspect.getdoc(sys.modules[cls.__module__]), inspect.getdoc(cls)]))


def _property(f: Field[Any], hint: Any) -> Schema:
    """The schema of one key."""
    both = {int, float}.intersection(get_args(hint)) and str in get_args(hint)  # a number or one of some texts
    hint, default, bounds = plain_type(hint), f.metadata.get("usual", f.default), bounds_of(f)
    entry: Schema = {"description": describe(f, hint)}
    if isinstance(hint, type) and issubclass(hint, Local):
        name = name_of("optimisers", default)
        values = [(key, of, getattr(default, of.name)) for key, of, _ in settings_of(type(default))]
        entry |= {"default": {"name": name} | {key: value for key, of, value in values if value != of.default}}
        if name == "sgd":
            return entry | _ref("optimisers")
        own = _variant(name, list(settings_of(type(default))), True, "")  # without a name the method's own
        return entry | {"if": {"required": ["name"]}, "then": _ref("optimisers"), "else": own}
    if isinstance(hint, type) and issubclass(hint, Method):
        return entry | {"default": {"name": "fedavg"}} | _ref("base")
    if is_dataclass(hint):
        return table(hint) | entry  # type: ignore[arg-type]
    if default not in (None, "", MISSING) and not is_required(f):
        entry["default"] = list(default) if isinstance(default, tuple) else default
    if hint is str and f.metadata.get("required"):
        entry["minLength"] = 1
    if word := f.metadata.get("alone"):
        return entry | {"anyOf": [{"const": word}, _value(hint, bounds)]}
    if both:
        number = _value(hint, replace(bounds, choices=(), pattern=""))
        return entry | {"anyOf": [number, {"type": "string", "enum": list(bounds.choices)}]}
    if "true" in f.metadata:
        return entry | {"anyOf": [{"type": "boolean"}, _value(hint, bounds)]}
    return entry | _value(hint, bounds)


def _value(hint: Any, bounds: Any) -> Schema:
    if get_origin(hint) is tuple:
        least = {"minItems": bounds.least} if bounds.least else {}
        least |= {"maxItems": bounds.most} if bounds.most else {}
        return {"type": "array", "items": _value(get_args(hint)[0], bounds)} | least
    if get_origin(hint) is dict:
        names = {"propertyNames": {"pattern": f"^(?:{bounds.keys})$"}} if bounds.keys else {}
        inside = {"additionalProperties": _value(get_args(hint)[1], bounds)}
        least = {"minProperties": bounds.least} if bounds.least else {}
        return {"type": "object"} | inside | names | least
    made: Schema = {"type": _TYPES[hint]} if hint in _TYPES else {}  # Any: anything
    made |= {word: getattr(bounds, end) for end, word in _ENDS.items() if getattr(bounds, end) is not None}
    if bounds.finite:  # JSON has no infinity
        made = {"minimum": -sys.float_info.max, "maximum": sys.float_info.max} | made
    if bounds.but:
        made["not"] = {"enum": list(bounds.but)}
    if bounds.choices:
        made["enum"] = list(bounds.choices)
    if bounds.pattern:
        made["pattern"] = f"^(?:{bounds.pattern})$"
    return made


def _table(properties: Schema, required: Iterable[str], about: str = "") -> Schema:
    entry = {"description": about} if about else {}
    return entry | {"type": "object", "properties": properties, "required": list(required)}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def _sentence(cls: type) -> str:
    return (inspect.getdoc(cls) or "").partition("\n\n")[0]
