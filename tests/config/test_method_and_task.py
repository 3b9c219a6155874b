"""Which methods take which tasks: a refusal never sends the user from one key to another and back."""

import pytest

import task_places
from fedfm.config.experiment import Experiment
from fedfm.config.registry import available, resolve
from fedfm.core import tasks
from fedfm.core.capabilities import HiddenModel
from fedfm.errors import InputError
from fedfm.runtime.population import populate
from small import jsonl

ADAPTATIONS = ("full", "head", "top_layers", "lora", "ffa_lora", "prompt", "side_adapter")
METHODS = tuple(name for name in available("methods") if not issubclass(resolve("methods", name), HiddenModel))


def refusal(method, task, adaptation):
    """The refusal of these three by the settings alone; None if there is none."""
    needed = {"foundation": "a-model"} if "foundation" in resolve("methods", method).__dataclass_fields__ else {}
    tables = {
        "data": {"path": "rows.jsonl"},
        "model": {"name": "a-model", "adaptation": {"name": adaptation}} | ({"task": task} if task else {}),
        "method": {"name": method, **needed},
    }
    try:
        Experiment.from_dict(tables)
    except InputError as error:
        return error
    return None


@pytest.mark.sample("classification", "instruction", "regression", "zero_shot")
@pytest.mark.parametrize("task", tasks.names())
def test_an_adaptation_is_refused_only_if_another_one_helps(task):
    for method in METHODS:
        found = {adaptation: refusal(method, task, adaptation) for adaptation in ADAPTATIONS}
        fits = [name for name, error in found.items() if error is None and name in tasks.find(task).adaptations]
        for adaptation, error in found.items():
            if error is not None and not fits:  # the message must name what the user has to change
                assert error.key in ("method.name", "model.task"), f"{method}, {task}, {adaptation}: {error}"
                assert f'"{method}"' in str(error)
            elif error is not None:
                assert error.key == "model.adaptation.name", f"{method}, {task}, {adaptation}: {error}"
                assert any(f'"{name}"' in str(error) for name in fits)


def test_a_method_of_one_class_a_row_names_the_tasks_that_it_takes():
    error = refusal("fedpft", "regression", "lora")
    assert 'rows of task "regression" have no single class: the method takes the tasks "classification"' in str(error)
    assert refusal("fedpft", "classification", "head") is None


def test_a_task_that_the_rows_imply_is_refused_before_the_adaptation(tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", task_places.rows("instruction"))
    tables = {
        "data": {"path": str(path), "partition": {"clients": 2}},
        "model": {"name": "a-model", "adaptation": {"name": "head"}},
        "method": {"name": "fedncm"},
    }
    with pytest.raises(InputError, match='rows of task "instruction" have no single class'):
        populate(Experiment.from_dict(tables))
