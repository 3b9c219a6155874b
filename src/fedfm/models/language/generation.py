"""The model's own generation settings that greedy answers ignore."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedfm.models.model import Model


def left_out(model: Model) -> str:
    """A line if ``generation_config.json`` asks for sampling or for beams; empty if it does not.

    Answers are greedy, so that a row gets the same answer each time. The other settings of that file apply, such as
    a repetition penalty.
    """
    config = getattr(model.module, "generation_config", None)
    if config is None or not model.task.answers:
        return ""
    beams = getattr(config, "num_beams", None) or 1
    asked = [*(["do_sample = true"] if getattr(config, "do_sample", False) else [])]
    asked += [f"num_beams = {beams}"] if beams > 1 else []
    if not asked:
        return ""
    return (
        f"generation_config.json of the model has {' and '.join(asked)}, which `fedfm predict` ignores: it takes "
        "the likeliest token each time, as generate(do_sample=False, num_beams=1)"
    )
