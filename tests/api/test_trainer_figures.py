"""A Trainer's compute_metrics in federate: the figures are those of Trainer.evaluate on the same rows."""

import math

import numpy as np
import pytest
import torch
from test_federate_trainer import Pad, arguments, bert, texts

import fedfm
from fedfm.core import tasks
from fedfm.errors import InputError


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


class ByBatch:
    """As batch_eval_metrics needs it: each call has one batch, and the last one makes the result."""

    def __init__(self):
        self.said, self.calls = [], 0

    def __call__(self, found, compute_result):
        self.calls += 1
        self.said += found.predictions.argmax(-1).eq(found.label_ids).tolist()
        if not compute_result:
            return {}
        said, self.said = self.said, []
        return {"right": sum(said) / len(said)}


def test_figures_that_grow_by_batch(tmp_path):
    function = ByBatch()
    made = trainer(tmp_path, function, batch_eval_metrics=True)
    result = federated(made, tmp_path)
    assert function.calls > 6
    assert result["details"]["metrics"]["right"] == pytest.approx(result["accuracy"])
    right = {c: m["right"] for c, m in result["details"]["client_metrics"].items()}
    assert right == pytest.approx(result["client_accuracy"])


def test_outputs_are_reduced_first(tmp_path):
    def classes(outputs, targets):
        return outputs.argmax(-1)

    def right(found):
        assert found.predictions.ndim == 1
        return {"right": (found.predictions == found.label_ids).mean()}

    result = federated(trainer(tmp_path, right, preprocess_logits_for_metrics=classes), tmp_path)
    assert result["details"]["metrics"]["right"] == pytest.approx(result["accuracy"])


def test_an_own_prediction_step_makes_the_figures(tmp_path):
    from transformers import Trainer

    class Same(Trainer):
        def prediction_step(self, *args, **kwargs):
            loss, outputs, targets = super().prediction_step(*args, **kwargs)
            return loss, (outputs, torch.full_like(targets, 2)), targets

    result = federated(trainer(tmp_path, lambda found: {"two": found.predictions[1].mean()}, base=Same), tmp_path)
    assert result["details"]["metrics"] == {"two": 2.0}
    assert not any("prediction_step" in line for line in result["warnings"])


@pytest.mark.parametrize("workers", [1, 2])
def test_every_client_may_have_its_own_model_and_its_own_test_rows(workers, tmp_path):
    clients, test = {"a": texts(), "b": texts(9, seed=3)}, {"a": texts(5, seed=4), "b": texts(12, seed=5)}
    more = {"partition": None, "clients": clients, "test": test, "method": "local", "run": {"workers": workers}}
    details = federated(trainer(tmp_path, eval_dataset=None), tmp_path, **more)["details"]
    a, b = (details["client_metrics"][c]["right"] for c in "ab")
    assert details["local_metrics"]["right"] == pytest.approx((5 * a + 12 * b) / 17)
    assert 0 <= details["metrics"]["right"] <= 1


def test_values_that_are_not_numbers_are_named_and_nested_dicts_are_flattened(tmp_path):
    odd = {"text": "x", "table": np.eye(2), "list": [1, 2], "huge": 10**400, 7: {"deep": {"er": np.array([3])}}}
    odd |= {"zero-dim": torch.tensor(2.0), "true": True, "nan": math.nan, "none": None}
    result = federated(trainer(tmp_path, lambda found: odd), tmp_path)
    assert result["details"]["metrics"] == {"7/deep/er": 3, "zero-dim": 2, "true": 1, "nan": None, "none": None}
    (line,) = [line for line in result["warnings"] if "only numbers" in line]
    assert line.endswith("not text, table, list, huge")


def test_at_most_a_hundred_figures(tmp_path):
    result = federated(trainer(tmp_path, lambda found: {str(i): i for i in range(300)}), tmp_path)
    assert len(result["details"]["metrics"]) == 100
    assert any(line.endswith("100, 101, 102, 103, 104 and 195 more") for line in result["warnings"])


def broken(*args):
    raise ValueError("of mine")


@pytest.mark.parametrize(
    ("function", "more", "words"),
    [
        (lambda found: None, {}, "compute_metrics returns a NoneType: expected a dict of numbers"),
        (lambda found: [0.5], {}, "compute_metrics returns a list"),
        (broken, {}, "compute_metrics fails on the test rows: ValueError: of mine"),
        (shares, {"preprocess_logits_for_metrics": broken}, "preprocess_logits_for_metrics fails on the test rows"),
        (shares, {"include_for_metrics": ["inputs"], "broken": "main_input_name"}, "prediction_step fails"),
    ],
    ids=["none", "list", "raises", "preprocess", "inputs"],
)
def test_a_function_that_fails_is_one_line_before_any_training(function, more, words, tmp_path):
    if more.pop("broken", None):
        made = trainer(tmp_path, function, **more)
        made.model.main_input_name = "pixels"
    else:
        made = trainer(tmp_path, function, **more)
    with pytest.raises(InputError, match=words) as error:
        federated(made, tmp_path)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_no_figures_are_a_notice(tmp_path):
    for i, (function, more, words) in enumerate([
        (lambda found: {}, {}, "compute_metrics returns no numbers"),
        (shares, {"eval_dataset": None, "clients": {"a": texts()}, "partition": None}, "there are no test rows"),
        (shares, {"preprocess_logits_for_metrics": lambda outputs, targets: None}, "or no outputs"),
    ]):  # fmt: skip
        told = {k: more.pop(k) for k in ("clients", "partition") if k in more}
        result = federated(trainer(tmp_path, function, **more), tmp_path, out=tmp_path / str(i), **told)
        assert any(words in line for line in result["warnings"]), words
        assert "metrics" not in result["details"]


def test_a_client_whose_rows_lack_a_class_is_named(tmp_path):
    def strict(found):
        if len(set(found.label_ids.tolist())) < 3:
            raise ValueError("y has less than 3 classes")
        return {"classes": 3}

    class Heard(fedfm.Progress):
        lines = ()

        def notice(self, text):
            self.lines += (text,)

    heard = Heard()
    few = texts(9, seed=3).filter(lambda row: row["label"] == 1)
    more = {"partition": None, "clients": {"a": texts(), "b": few}, "test": {"a": texts(), "b": few}}
    details = federated(trainer(tmp_path, strict), tmp_path, **more, progress=heard)["details"]
    assert details["metrics"] == {"classes": 3.0}
    assert details["client_metrics"] == {"a": {"classes": 3.0}, "b": None}
    assert details["local_metrics"] == {"classes": 3.0}
    assert "compute_metrics fails on the test rows of b: their figures are null" in heard.lines


def test_figures_of_a_detector(tmp_path):
    """Its targets are a list of dicts for each batch."""
    from test_federate_trainers_of_others import SMALL
    from transformers import Trainer, YolosConfig, YolosForObjectDetection

    config = YolosConfig(**SMALL, image_size=[16, 16], patch_size=8, num_detection_tokens=3, num_labels=2)
    rows = [
        {"pixel_values": torch.full((3, 16, 16), i / 7.0),
         "labels": {"class_labels": torch.zeros(i % 3, dtype=torch.long), "boxes": torch.full((i % 3, 4), 0.5)}}
        for i in range(7)
    ]  # fmt: skip

    def collate(batch):
        pixels = torch.stack([row["pixel_values"] for row in batch])
        return {"pixel_values": pixels, "labels": [row["labels"] for row in batch]}

    def figures(found):
        assert len(found.predictions) == len(found.label_ids) == 4  # batches of two
        return {
            "boxes": sum(len(of["boxes"]) for batch in found.label_ids for of in batch),
            "score": np.concatenate([batch[1] for batch in found.predictions]).mean(),
        }

    def made(**args):
        settings = {"remove_unused_columns": False, "per_device_eval_batch_size": 2} | args
        told = {"train_dataset": rows, "eval_dataset": rows, "data_collator": collate, "compute_metrics": figures}
        torch.manual_seed(0)
        return Trainer(YolosForObjectDetection(config), arguments(tmp_path, **settings), **told)

    one = made(eval_do_concat_batches=False)
    found = federated(one, tmp_path, partition={"clients": 1})["details"]["metrics"]
    assert found == pytest.approx(of_evaluate(one), rel=1e-5)
    assert found["boxes"] == 6
    with pytest.raises(InputError, match=r"give args\.eval_do_concat_batches=False"):
        federated(made(), tmp_path, out=tmp_path / "joined")


def test_figures_of_written_answers(tmp_path):
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    module = T5ForConditionalGeneration(T5Config(vocab_size=20, decoder_start_token_id=0, **sizes))
    rows = [{"input_ids": [3 + i, 4, 1], "labels": [5 + i % 2, 6, 1]} for i in range(7)]
    settings = {"output_dir": str(tmp_path / "hf"), "predict_with_generate": True, "generation_max_length": 5}
    settings |= {"num_train_epochs": 1, "use_cpu": True, "report_to": [], "disable_tqdm": True}
    settings |= {"per_device_eval_batch_size": 2}

    def figures(found):
        assert not found.predictions[:, 5:].any()  # the Trainer pads
        return {"mean": found.predictions.mean()}

    def collate(batch):
        return {key: torch.tensor([row[key] for row in batch]) for key in ("input_ids", "labels")}

    told = {"train_dataset": rows, "eval_dataset": rows, "data_collator": collate, "compute_metrics": figures}
    made = Seq2SeqTrainer(module, Seq2SeqTrainingArguments(**settings), **told)
    found = federated(made, tmp_path, partition={"clients": 1})["details"]["metrics"]
    assert found == pytest.approx(of_evaluate(made))


def test_a_silo_rounds_its_figures_and_a_wrong_form_is_a_fault():
    from fedfm.errors import ClientFault
    from fedfm.runtime.coarse_scores import coarse
    from fedfm.runtime.evaluation import check_scores

    scores = {"n": 3, "metrics": {"f1": 0.123456, "none": None}}
    assert coarse(scores, tasks.find("own"))["metrics"] == {"f1": 0.1235, "none": None}
    check_scores(scores, tasks.find("own"), ())
    for wrong in ([1.0], {"f1": "high"}, {"f1": math.inf}, {"f1": [0.5]}, "high"):
        with pytest.raises(ClientFault):
            check_scores({"n": 3, "metrics": wrong}, tasks.find("own"), ())
