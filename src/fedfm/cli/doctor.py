"""`fedfm doctor`: check whether the installation is complete, and measure the speed of the machine."""

from __future__ import annotations

import os
import re
import shutil
import sys
import timeit
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

_NAME = re.compile(r"([A-Za-z0-9._-]+)(?:\[([^]]*)\])?\s*(.*)")  # a requirement: name, extras, versions
_EXTRA = re.compile(r"\bextra\s*==\s*[\"']([^\"']+)[\"']")
_WIDTH = 768  # number of inputs, and of outputs, of the linear maps that are timed


def examine() -> Iterator[dict[str, Any]]:
    """Run all checks; yield each when it is done, as {what, status: ok | note | bad, found}."""
    return ({"what": what, "status": status, "found": found} for what, status, found in _checks())


def _checks() -> Iterator[tuple[str, str, str]]:
    yield "python", "ok" if sys.version_info >= (3, 11) else "bad", sys.version.split()[0]
    yield from _packages()
    yield from _model()
    yield from _products()
    yield "cores", "ok", f"{os.cpu_count()} (run.workers = 0 uses all, one thread a client)"
    fork = hasattr(os, "fork")
    yield "workers", "ok" if fork else "note", "forked" if fork else "this system cannot fork; set run.workers = 1"
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    yield "disk", "ok" if free > 1 else "bad", f"{free:.1f} GB free here"
    yield _cache()
    offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("0", "", "false")
    yield "model hub", "ok", "offline (HF_HUB_OFFLINE is set)" if offline else "models named by a hub id are downloaded"
    off = os.environ.get("FLWR_TELEMETRY_ENABLED") == "0"
    yield "telemetry", "ok", "off" if off else "fedfm turns Flower's off in every process that it starts"


def _packages() -> Iterator[tuple[str, str, str]]:
    """Check every dependency in the metadata of this installation, then each extra with its packages."""
    extras: dict[str, set[str]] = {}
    for name, brought, versions, extra in _requirements("fedfm"):
        if extra:
            extras.setdefault(extra, set()).update({name, *brought})
            continue
        found = _version(name)
        yield name, "ok" if found else "bad", found or f"missing: pip install '{name}{versions}'"
    for extra, packages in sorted(extras.items()):
        there = {name: found for name in packages if (found := _version(name)) is not None}
        parts = [f"{name} {found}" for name, found in sorted(there.items())]
        if missing := sorted(packages - there.keys()):
            parts.append(f"not installed: {', '.join(missing)}; pip install 'fedfm[{extra}]' installs them")
        yield f"extra {extra}", "note" if missing else "ok", "; ".join(parts)
    if found := _version("flwr"):
        from fedfm.engines.flower.private_api import TESTED

        right = found.startswith(TESTED)
        yield "flower", "ok" if right else "bad", found if right else f"{found}, expected {'x or '.join(TESTED)}x"


def _requirements(package: str, deep: bool = True) -> Iterator[tuple[str, set[str], str, str]]:
    """Yield for each requirement (name, packages that its extras install, versions, the extra that requires it).

    Args:
        deep: whether to look up what the extras of a requirement install. The look-up itself is not deep: a package may
            require its own extras, and the recursion would not end.
    """
    for text in requires(package) or ():
        wanted, _, condition = text.partition(";")
        match, extra = _NAME.match(wanted.strip()), _EXTRA.search(condition)
        if match is None:
            continue
        name, own, versions = match.groups(default="")
        brought: set[str] = set()
        if deep and own and _version(name) is not None:
            theirs = {part.strip() for part in own.split(",")}
            brought = {other for other, _, _, of in _requirements(name, deep=False) if of in theirs}
        yield name.lower().replace("_", "-"), brought, versions.strip(), extra[1] if extra else ""


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cache() -> tuple[str, str, str]:
    """Report the size of the cache of prepared rows."""
    from fedfm.runtime import row_cache

    place = row_cache.folder()
    if place is None:
        return "cache", "ok", "off (FEDFM_CACHE is empty)"
    files, total = row_cache.size(place)
    of = f"{total / 1e9:.2f} of at most {row_cache.limit() / 1e9:g} GB"
    return "cache", "ok", f"{files} files of prepared rows, {of}, in {place}"


def _model() -> Iterator[tuple[str, str, str]]:
    """Check that the built-in model loads and computes."""
    try:
        import torch

        from fedfm.models.load import load_model
        from fedfm.models.spec import ModelSpec

        model = load_model(ModelSpec(name="nano-vit"), classes=("a", "b"), kind="image", seed=0)
        with torch.no_grad():
            logits = model.logits({"pixel_values": torch.zeros(1, 3, 32, 32)})
        fine = bool(torch.isfinite(logits).all())
        yield "nano-vit", "ok" if fine else "bad", f"{sum(model.layout.sizes.values())} parameters trainable by LoRA"
        yield "device", "ok", "cuda" if torch.cuda.is_available() else "cpu"
    except Exception as error:  # doctor reports any error
        yield "nano-vit", "bad", f"{type(error).__name__}: {error}"


def _products() -> Iterator[tuple[str, str, str]]:
    """Measure linear layers in float32 and in bfloat16, which is slower on processors that only emulate bfloat16."""
    try:
        import torch

        from fedfm.linalg.threads import torch_threads
        from fedfm.training.packed.linear import Linear

        with torch_threads(1), torch.no_grad():
            x, weight = torch.ones(256, _WIDTH), torch.ones(_WIDTH, _WIDTH)
            full, low = (_seconds(Linear(weight, None, low), x) for low in (False, True))
        speed = f"{2e-9 * x.numel() * _WIDTH / full:.0f} Gflop/s a core"
        gain = f'kernels = "fast_bf16" is {full / low:.1f} times as fast'
        yield "linear maps", "ok", f"{speed} in float32; {gain}{'' if full > low else ': do not use it here'}"
    except (ImportError, RuntimeError) as error:
        yield "linear maps", "bad", f"{type(error).__name__}: {error}"


def _seconds(linear: Any, x: Any) -> float:
    return min(timeit.repeat(lambda: linear.forward(x), number=1, repeat=8))
