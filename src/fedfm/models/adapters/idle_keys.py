"""Keys of [model.adaptation] that the chosen adaptation does not read."""

from __future__ import annotations

import dataclasses

from fedfm.models.spec import AdaptationSpec

_LORA = ("lora", "ffa_lora")
# key of [model.adaptation] -> the adaptations that read it; all other keys are LoRA's
_READ_BY = {
    "rank": (*_LORA, "side_adapter"),
    "layers": (*_LORA, "top_layers"),
    "tokens": ("prompt",),
    "released": ("side_adapter",),
    "projection": ("side_adapter",),
}


def notices(spec: AdaptationSpec) -> list[str]:
    """A notice about keys of other adaptations whose value is not the default."""
    given = [f.name for f in dataclasses.fields(spec) if getattr(spec, f.name) != f.default and f.name != "name"]
    idle = [key for key in given if spec.name not in _READ_BY.get(key, _LORA)]
    return [f'model.adaptation.{", ".join(idle)}: no effect with "{spec.name}"'] if idle else []
