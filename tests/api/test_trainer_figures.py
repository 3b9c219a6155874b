"""A Trainer's compute_metrics in federate: the figures are those of Trainer.evaluate on the same rows."""

import numpy as np
import pytest
from test_federate_trainer import Pad, arguments, bert, texts

import fedfm


def shares(found):
    """Share of right rows, and of each class among the predictions."""
    said = found.predictions.argmax(-1)
    return {"right": (said == found.label_ids).mean(), "said": {str(c): int((said == c).sum()) for c in range(3)}}


def trainer(tmp_path, compute_metrics=shares, base=None, **more):
    from transformers import Trainer

    told = {"train_dataset": texts(), "eval_dataset": texts(17, seed=1), "data_collator": Pad()}
    args = {k: more.pop(k) for k in [*more] if k.startswith(("batch_eval", "include", "bf16", "eval_do"))}
    return (base or Trainer)(bert(), arguments(tmp_path, **args), **told | {"compute_metrics": compute_metrics} | more)


def federated(made, tmp_path, **more):
    settings = {"partition": {"clients": 3}, "rounds": 1, "out": tmp_path / "run", "run": {"workers": 1}}
    return fedfm.federate(made, **settings | more)


def of_evaluate(made):
    found = made.evaluate()
    names = {"loss", "runtime", "samples_per_second", "steps_per_second", "model_preparation_time"}
    return {k.removeprefix("eval_"): x for k, x in found.items() if k.removeprefix("eval_") not in names | {"epoch"}}


@pytest.mark.parametrize(
    "args",
    [{}, {"include_for_metrics": ["inputs", "loss"]}, {"eval_do_concat_batches": False}, {"bf16": True}],
    ids=["plain", "inputs", "batches", "bf16"],
)
def test_figures_are_those_of_evaluate(args, tmp_path):
    def figures(found):
        said = np.concatenate(found.predictions) if args.get("eval_do_concat_batches") is False else found.predictions
        more = {} if found.losses is None else {"loss_of_rows": found.losses.mean()}
        more |= {} if found.inputs is None else {"ids": found.inputs[found.inputs > 0].mean()}
        return {"mean": said.mean(), "largest": said.max(), **more}

    made = trainer(tmp_path, figures, **args)
    result = federated(made, tmp_path)
    expected = of_evaluate(made)
    found = result["details"]["metrics"]
    assert found == pytest.approx(expected, rel=1e-3 if args.get("bf16") else 1e-5)
    assert len(found) == (4 if "include_for_metrics" in args else 2)


def test_figures_are_in_each_round_and_by_client(tmp_path):
    made = trainer(tmp_path)
    result = federated(made, tmp_path, rounds=2)
    lines = [line for line in fedfm.load_run(result["run"]).metrics() if "metrics" in line]
    assert len(lines) == 3
    details = result["details"]
    assert details["metrics"]["right"] == pytest.approx(result["accuracy"])
    assert details["metrics"].keys() == {"right", "said/0", "said/1", "said/2"}
    by_client = details["client_metrics"]
    assert {c: m["right"] for c, m in by_client.items()} == pytest.approx(result["client_accuracy"])
    rows = {c: sum(m[f"said/{k}"] for k in range(3)) for c, m in by_client.items()}
    assert sum(rows.values()) == 17
    weighted = sum(rows[c] * m["right"] for c, m in by_client.items()) / 17
    assert details["local_metrics"]["right"] == pytest.approx(weighted)
    assert details["local_metrics"]["right"] == pytest.approx(details["metrics"]["right"])  # a mean over rows
