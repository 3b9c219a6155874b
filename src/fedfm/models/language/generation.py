"""What a model's own settings of generation ask for and greedy answers leave out."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedfm.models.model import Model


def left_out(model: Model) -> str:
    """A line where ``generation_config.json`` asks for drawn answers or for beams; empty where it does not.

    Answers are greedy, so that a row has the same one each time. All else of that file is followed, such as a penalty
    of repetitions.
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
        f"generation_config.json of the model has {' and '.join(asked)}, which `fedfm predict` leaves out: it takes "
        "the likeliest token each time, as generate(do_sample=False, num_beams=1)"
    )
