"""Regression: numbers in files, their scale, scores by scikit-learn, loss and Trainer of transformers, exports."""

import json
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import t as student
from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score
from task_files import jsonl, loader

import tiny_text
from fedfm.api.execute import run
from fedfm.api.predict import export, predict
from fedfm.api.predict import load as load_run
from fedfm.api.prediction_files import write
from fedfm.config.experiment import Experiment
from fedfm.core.rows import Rows
from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec
from fedfm.errors import ClientFault, InputError
from fedfm.models.export import export as write_model
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.runtime.coarse_scores import coarse
from fedfm.runtime.run_directory import Run
from fedfm.tasks import _numbers
from fedfm.tasks.regression import Regression

TASK = "regression"
load = loader(TASK)
WORDS = ("swim", "river", "wing", "nest", "leaf", "old")


def rows(n=40, seed=0):
    """Texts with numbers that follow from their words."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(n):
        words = [str(word) for word in rng.choice(WORDS, 5)]
        label = 1.5 * words.count("river") - words.count("nest")
        more = {"a": 2000 + 10 * label, "b": 0.001 * words.count("wing")}
        made.append({"text": " ".join(words), "label": label, **more, "who": "ns"[i % 2]})
    return made


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("numbers")
    tiny_text.save_bert(folder / "bert")
    tiny_text.save_llama(folder / "llama")
    jsonl(folder / "rows.jsonl", rows())
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 4)).astype(np.float32)
    np.savez(folder / "rows.npz", x=x, y=x @ np.array([1.0, -2.0, 3.0, 0.5]) + 50)
    return folder


def experiment(place, *, data=None, model=None, method=None, features=False, rounds=2, **more):
    return {
        "data": {
            "path": str(place / ("rows.npz" if features else "rows.jsonl")),
            "partition": {"name": "iid", "clients": 2},
            **(data or {}),
        },
        "model": {
            "name": "features" if features else str(place / "bert"),
            "task": TASK,
            "max_length": 10,
            **({} if features else {"adaptation": {"name": "lora", "rank": 2}}),
            **(model or {}),
        },
        "method": {
            "name": "fedavg",
            "rounds": rounds,
            "local": {"name": "sgd", "learning_rate": 0.1, "batch_size": 8},
            **(method or {}),
        },
        "run": {"seed": 1, "workers": 1, **more.pop("run", {})},
        **more,
    }


# --- scores -----------------------------------------------------------------------------------------------------------


def task_of(rng, targets):
    means, scales = rng.normal(size=targets) * 1000, rng.uniform(0.01, 100, targets)
    return Regression(target_means=tuple(means.tolist()), target_scales=tuple(scales.tolist()))


@settings(max_examples=25, deadline=None)
@given(
    holders=st.lists(st.integers(0, 3), min_size=3, max_size=40),
    seed=st.integers(0, 2**32 - 1),
    targets=st.integers(1, 3),
)
def test_scores_over_clients_are_those_of_scikit_learn(holders, seed, targets):
    rng, n = np.random.default_rng(seed), len(holders)
    task = task_of(rng, targets)
    z, said = rng.normal(size=(n, targets)), rng.normal(size=(n, targets))
    y, y_said = (v * task.target_scales + task.target_means for v in (z, said))
    parts = [
        task.scores_of(None, Rows({"targets": torch.tensor(y[i])}), torch.tensor(said[i]))
        for i in (np.flatnonzero(np.array(holders) == client) for client in range(4))
    ]
    joined, sent = task.join_scores(parts), [part for part in parts if part["n"] >= task.least_rows]
    exact, rounded = task.join_scores(sent), task.join_scores([coarse(part, task) for part in sent])
    wanted = {"mse": mean_squared_error, "mae": mean_absolute_error, "r2": r2_score}
    for name, function in wanted.items():
        each = function(y, y_said, multioutput="raw_values")
        assert joined[f"{name}_by_target"] == pytest.approx(each.tolist(), rel=1e-8, abs=1e-8)
        assert joined[name] == pytest.approx(float(each.mean()), rel=1e-8, abs=1e-8)
        if sent:
            assert rounded[name] == pytest.approx(exact[name], rel=5e-3, abs=5e-3)
    assert joined["loss"] == pytest.approx(float(((z - said) ** 2).mean()), rel=1e-9)
    assert joined["accuracy"] is None


def test_standard_errors_are_those_of_the_jackknife():
    rng, n = np.random.default_rng(0), 4000
    task = task_of(rng, 1)
    z = rng.normal(size=(n, 1))
    said = 0.8 * z + rng.standard_t(8, size=(n, 1)) * 0.4
    y, y_said = (v * task.target_scales + task.target_means for v in (z, said))
    found = task.scores_of(None, Rows({"targets": torch.tensor(y)}), torch.tensor(said))
    e = (y_said - y)[:, 0]
    assert found["mse_se_by_target"] == pytest.approx([np.std(e**2, ddof=1) / np.sqrt(n)], rel=1e-9)
    assert found["mae_se_by_target"] == pytest.approx([np.std(np.abs(e), ddof=1) / np.sqrt(n)], rel=1e-9)
    u, total, squares = e**2, y.sum(), (y**2).sum()
    spread = squares - y[:, 0] ** 2 - (total - y[:, 0]) ** 2 / (n - 1)  # (n,), each without one row
    left = 1 - (u.sum() - u) / spread
    jackknife = np.sqrt((n - 1) / n * ((left - left.mean()) ** 2).sum())
    assert found["r2_se_by_target"] == pytest.approx([jackknife], rel=0.01)


@pytest.mark.parametrize("moments", [None, [1.0] * 8, [None] * 9, []])
def test_sums_of_another_form_give_no_scores(moments):
    found = Regression().figures_of({"rows": 3, "loss_of_rows": 1.0, "moments": moments})
    assert found["loss"] == pytest.approx(1 / 3)
    assert found["mse"] is found["r2"] is None


def test_targets_without_a_spread_have_no_r2():
    found = Regression().scores_of(None, Rows({"targets": torch.full((4, 1), 1e6)}), torch.zeros(4, 1))
    assert found["r2"] is None
    assert found["mae"] == pytest.approx(1e6)


# --- rows -------------------------------------------------------------------------------------------------------------


def test_forms_of_files_give_the_same_numbers(tmp_path):
    pandas = pytest.importorskip("pandas")
    made = rows(6)
    frame = pandas.DataFrame(made)
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.to_parquet(tmp_path / "a.parquet")
    jsonl(tmp_path / "a.jsonl", made)
    for file in sorted(tmp_path.iterdir()):
        table = load(file, test_fraction=0)
        assert (table.kind, table.labels, table.classes) == ("text", None, ("value",))
        assert table.targets.ravel().tolist() == [row["label"] for row in made]
        several = load(file, test_fraction=0, targets=("b", "a"))
        assert several.classes == ("b", "a")
        assert several.targets.tolist() == [[row["b"], row["a"]] for row in made]
        assert "label" in several.columns


def test_arrays_of_numbers_are_targets(tmp_path):
    x, y = np.zeros((4, 2), np.float32), np.array([[1.0, 2], [3, 4], [5, 6], [7, 9]])
    np.savez(tmp_path / "a.npz", x=x, y=y, classes=np.array(["up", "down"]))
    np.savez(tmp_path / "b.npz", x=x, up=y[:, 0], down=y[:, 1])
    for name, keys in (("a", {}), ("b", {"targets": ("up", "down")})):
        table = load(tmp_path / f"{name}.npz", test_fraction=0, **keys)
        assert (table.classes, table.targets.tolist()) == (("up", "down"), y.tolist())
    np.savez(tmp_path / "c.npz", x=x, y=np.array([1, 2, 3, 5]))  # integers are numbers, too
    assert load(tmp_path / "c.npz", test_fraction=0).targets.tolist() == [[1], [2], [3], [5]]


def test_a_folder_of_images_has_its_numbers_in_the_metadata(tmp_path):
    from PIL import Image

    for i in range(4):
        Image.new("L", (8, 8), 60 * i).save(tmp_path / f"{i}.png")
    with pytest.raises(InputError, match=r"put a metadata\.csv into"):
        load(tmp_path)
    lines = "".join(f"{i}.png,{i / 2}\n" for i in range(4))
    (tmp_path / "metadata.csv").write_text(f"file_name,label\n{lines}")
    assert load(tmp_path, test_fraction=0).targets.ravel().tolist() == [0.0, 0.5, 1.0, 1.5]


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("many", r"line 3: column \"label\" holds 'many': a finite number is expected"),
        ("1,5", r"line 3: .* with a decimal point"),
        ("1_000", r"line 3: .*a finite number is expected"),
        ("nan", r"line 3: .*a finite number is expected"),
        (float("nan"), r"line 3: .*nan: a finite number is expected"),
        (float("inf"), r"line 3: .*inf: a finite number is expected"),
        (True, r"line 3: .*True: a finite number is expected"),
        ("", r'line 3: column "label" is empty: give a number, or remove the row'),
        (None, r'line 3: column "label" is empty'),
        (1e40, r"line 3: .*use another unit"),
        ([1.0, 2.0], r"line 3: 2 numbers in \"label\", and 1 in .*line 1"),
        ({"a": 1}, r"line 3: .*a finite number is expected"),
    ],
)
def test_a_cell_of_another_form_is_refused_with_its_place(cell, words, tmp_path):
    made = rows(5)
    made[2]["label"] = cell
    with pytest.raises(InputError, match=words):
        load(jsonl(tmp_path / "a.jsonl", made))


def test_missing_and_repeated_columns_are_refused(place):
    with pytest.raises(InputError, match=r'no column "c" \(data\.targets\)'):
        load(place / "rows.jsonl", targets=("a", "c"))
    with pytest.raises(InputError, match=r'"a" occurs twice'):
        load(place / "rows.jsonl", targets=("a", "a"))
    with pytest.raises(InputError, match=r'no column "number" \(data\.label\)'):
        load(place / "rows.jsonl", label="number")


def test_targets_need_the_task(place):
    tables = experiment(place, data={"targets": ["a", "b"]})
    del tables["model"]["task"]
    with pytest.raises(InputError, match=r'data\.targets.*model\.task = "regression"'):
        Experiment.from_dict(tables)


# --- the scale --------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    owners=st.lists(st.integers(0, 3), min_size=2, max_size=50),
    seed=st.integers(0, 2**32 - 1),
    offset=st.sampled_from([0.0, 1e3, 1.7e9]),
    unit=st.sampled_from([1e-6, 1.0, 1e12]),
)
def test_sums_of_clients_give_the_scale_of_their_rows_in_any_order(owners, seed, offset, unit):
    rng, owners = np.random.default_rng(seed), np.array(owners)
    y = (rng.normal(size=(len(owners), 2)) + offset) * unit
    parts = [_numbers.sums(y[owners == k]) for k in range(4)]
    found, _ = _numbers.scale_of_sums(parts, ("a", "b"))
    np.testing.assert_allclose(found["target_means"], y.mean(0), rtol=1e-12, atol=1e-12 * unit)
    np.testing.assert_allclose(found["target_scales"], y.std(0), rtol=1e-6)
    shuffled = [_numbers.sums(rng.permutation(y[owners == k])) for k in rng.permutation(4)]
    assert _numbers.scale_of_sums(shuffled, ("a", "b"))[0] == found  # the same bits
    for part in parts:
        _numbers.check_sums(part, 2)


def test_equal_numbers_at_all_silos_are_refused():
    parts = [_numbers.sums(np.full((n, 1), 0.1)) for n in (3, 0, 7)]
    with pytest.raises(InputError, match=r"all 10 training rows have the same target, 0\.1: there is nothing to learn"):
        _numbers.scale_of_sums(parts, ("value",))
    with pytest.raises(InputError, match="no client has training rows"):
        _numbers.scale_of_sums([_numbers.sums(np.zeros((0, 1)))], ("value",))


@pytest.mark.parametrize(
    "found", [[], [1.0, 2.0], [-1.0, 0, 0], [1.5, 0, 0], [1e12, 0, 0], [1.0, 1e31, 0], [1.0, 0, -1.0], [math.nan, 0, 0]]
)
def test_sums_that_are_not_those_of_rows_are_refused(found):
    with pytest.raises(ClientFault):
        _numbers.check_sums(found, 1)


def test_the_scale_is_that_of_all_clients_training_rows_and_is_kept(place, tmp_path):
    result = run(experiment(place, data={"targets": ["a", "b"]}, rounds=0), tmp_path / "run")
    table = load_table(DataSpec(path=str(place / "rows.jsonl"), targets=("a", "b")), seed=1, task=TASK)
    y = table.targets[table.rows("train")]
    assert len(y) == 32  # of 40: the others are test rows
    for spec in (Run.open(tmp_path / "run").experiment.model, load_run(tmp_path / "run")[1].task):
        np.testing.assert_allclose(spec.target_means, y.mean(0), rtol=1e-12)
        np.testing.assert_allclose(spec.target_scales, y.std(0), rtol=1e-12)
    assert [text for text in result["warnings"] if "mean and deviation of the 32 training rows" in text]


def test_units_of_the_targets_do_not_matter(place, tmp_path):
    """In other units the same model is trained, and its errors are in these units."""
    made = [row | {"label": 1e6 * row["label"] - 4e7} for row in rows()]
    found = run(experiment(place), tmp_path / "a")
    other = run(experiment(place, data={"path": str(jsonl(tmp_path / "b.jsonl", made))}), tmp_path / "b")
    assert other["loss"] == pytest.approx(found["loss"], rel=1e-4)
    assert other["details"]["r2"] == pytest.approx(found["details"]["r2"], abs=1e-4)
    assert other["details"]["mae"] == pytest.approx(1e6 * found["details"]["mae"], rel=1e-4)
    assert other["accuracy"] is None


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"target_means": [1.0]}, r"set both or neither"),
        ({"target_means": [1.0, 2.0], "target_scales": [1.0, 1.0]}, r"2 numbers for 1 targets"),
        ({"target_means": [1.0], "target_scales": [1.0], "scale_targets": False}, r"have no effect; drop them"),
        ({"target_means": [1.0], "target_scales": [0.0]}, r"target_scales.*above 0"),
        ({"task": "classification", "target_means": [1.0]}, r'belongs to task "regression"'),
    ],
)
def test_a_scale_that_does_not_fit_is_refused(model, words, place, tmp_path):
    with pytest.raises(InputError, match=words):
        run(experiment(place, model=model), tmp_path / "run")


def test_one_number_in_all_training_rows_is_refused(place, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [row | {"label": 3.0} for row in rows()])
    for scale in (True, False):
        with pytest.raises(
            InputError, match=r"all 32 training rows have the same target, 3: there is nothing to learn"
        ):
            run(experiment(place, data={"path": str(path)}, model={"scale_targets": scale}), tmp_path / "run")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            {"privacy": {"mechanism": "dp_sgd", "unit": "record", "noise_multiplier": 1.0, "clip_norm": 1.0}},
            r"without noise, so that \[privacy\] would not cover it: set it to false, or set a fixed scale",
        ),
        ({"method": {"name": "fedpft"}}, r"computes with the class of each row"),
        ({"method": {"name": "fedncm"}}, r"computes with the class of each row"),
        ({"method": {"name": "ccvr"}}, r"computes with the class of each row"),
    ],
)
def test_unsuitable_settings_are_refused_before_the_rows_are_read(more, words, place):
    tables = experiment(place)
    tables |= {key: {**tables.get(key, {}), **of} for key, of in more.items() if key != "method"}
    if "method" in more:
        tables["method"] = more["method"]
        del tables["model"]["adaptation"]
    with pytest.raises(InputError, match=words):
        Experiment.from_dict(tables)


@pytest.mark.parametrize("name", ["dirichlet", "by_class"])
def test_partitions_by_class_are_refused(name, place, tmp_path):
    keys = {"dirichlet": {"alpha": 1.0}, "by_class": {"classes_per_client": 1}}[name]
    with pytest.raises(InputError, match=rf'"{name}" needs (labels|one class a row)'):
        run(experiment(place, data={"partition": {"name": name, "clients": 2, **keys}}), tmp_path / "run")


# --- training ---------------------------------------------------------------------------------------------------------


def loaded(place, task=None, targets=("a", "b"), name="bert", adaptation="full"):
    table = load(place / "rows.jsonl", targets=targets, test_fraction=0)
    spec = ModelSpec(str(place / name), max_length=10, adaptation=AdaptationSpec(adaptation), **(task or {}))
    return table, load_model(spec, classes=table.classes, kind="text", task=TASK)


@pytest.mark.parametrize("targets", [("a",), ("a", "b")])
def test_the_loss_is_that_of_transformers(targets, place):
    table, model = loaded(place, targets=targets)
    batch = model.prepare(table, range(8)).batch(range(8))
    assert model.module.config.problem_type == "regression"
    inputs = {key: value for key, value in batch.items() if key != "targets"}
    theirs = model.module(**inputs, labels=batch["targets"].float()).loss
    torch.testing.assert_close(model.loss(batch), theirs, rtol=1e-5, atol=1e-6)


def test_a_local_pass_is_that_of_transformers_trainer(place, tmp_path):
    """Ten steps of SGD on the same rows in the same order, without dropout: the losses agree to 1e-5."""
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainingArguments

    keys = {"target_means": (2005.0, 0.0008), "target_scales": (12.0, 0.0009)}
    table, model = loaded(place, keys)
    prepared = model.prepare(table, range(40))
    scaled = _numbers.scale(prepared.tensors["targets"], keys["target_means"], keys["target_scales"]).float()
    batches = [prepared.batch(range(at, at + 4)) for at in range(0, 40, 4)]
    ours = []
    start = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    live = [p for p in model.module.parameters() if p.requires_grad]
    optimiser = torch.optim.SGD(live, lr=0.05)
    for batch in batches:
        optimiser.zero_grad()
        loss = model.loss(batch)
        loss.backward()
        optimiser.step()
        ours.append(loss.item())
    model.module.load_state_dict(start)

    class InOrder(Trainer):
        def _get_train_sampler(self, *args):
            return SequentialSampler(self.train_dataset)

    padded = prepared.to_padded().tensors
    examples = [
        {name: padded[name][i] for name in ("input_ids", "attention_mask")} | {"labels": scaled[i]} for i in range(40)
    ]
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, num_train_epochs=1, learning_rate=0.05, optim="sgd",
        lr_scheduler_type="constant", max_grad_norm=0.0, logging_steps=1, report_to=[], use_cpu=True,
        save_strategy="no",
    )  # fmt: skip
    model.module.config.hidden_dropout_prob = 0.0
    for module in model.module.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    trainer = InOrder(model.module, arguments, train_dataset=examples)
    trainer.train()
    theirs = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert ours == pytest.approx(theirs, rel=1e-5, abs=5e-5)  # the Trainer's log has few digits


@pytest.mark.parametrize("more", [{}, {"adaptation": {"name": "head"}}, {"adaptation": {"name": "full"}}])
def test_a_run_learns_numbers(more, place, tmp_path):
    local = {"name": "adamw", "learning_rate": 0.01, "epochs": 3, "batch_size": 8}
    result = run(experiment(place, model=more, method={"local": local}, rounds=4), tmp_path / "run")
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]
    assert result["accuracy"] is None
    report = re.sub(r"<[^>]+>", " ", (tmp_path / "run" / "report.html").read_text())
    assert "intervals of 95 % over rows" in report
    assert f"loss {result['loss']:.4g}" in report


def test_vectors_with_secure_sums_and_validation_rows(place, tmp_path):
    tables = experiment(place, features=True, rounds=8, privacy={"aggregator": "secagg"})
    tables["data"]["partition"] = {"name": "iid", "clients": 4}
    result = run(tables, tmp_path / "run")
    assert result["details"]["r2"] > 0.95
    tables = experiment(place, features=True, rounds=6, data={"val_fraction": 0.2}, run={"patience": 2})
    assert run(tables, tmp_path / "patient")["details"]["val_loss"] is not None


@pytest.mark.proof  # it loads the accountant
def test_noise_needs_a_fixed_scale(place, tmp_path):
    privacy = {"mechanism": "dp_sgd", "unit": "record", "noise_multiplier": 0.3, "clip_norm": 1.0, "delta": 1e-3}
    fixed = {"target_means": [50.0], "target_scales": [4.0]}
    result = run(experiment(place, features=True, model=fixed, rounds=1, privacy=privacy), tmp_path / "run")
    assert result["epsilon"] > 0
    assert result["loss"] is not None


# --- predictions and exports ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(place, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "run"
    run(experiment(place, data={"targets": ["a", "b"]}), out)
    return out


def test_predictions_are_in_the_units_of_the_targets_by_name(finished, place, tmp_path):
    found = predict(finished, place / "rows.jsonl")
    assert found["classes"] == ["a", "b"]
    assert not [text for text in found["warnings"] if "label" in text]
    a = np.array([row["a"] for row in found["values"]])
    assert 1900 < a.min() < a.max() < 2100
    write(found, tmp_path / "p.csv")
    head, first, *_ = (tmp_path / "p.csv").read_text().splitlines()
    assert head == "row,values.a,values.b"
    assert float(first.split(",")[1]) == a[0]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT on transformers 5
@pytest.mark.parametrize("to", ["hf", "peft"])
def test_transformers_gives_the_same_numbers_from_an_export(to, finished, place, tmp_path):
    from peft import AutoPeftModelForSequenceClassification
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    out = tmp_path / to
    export(finished, to, out)
    auto = AutoModelForSequenceClassification if to == "hf" else AutoPeftModelForSequenceClassification
    module, tokenizer = auto.from_pretrained(str(out)), AutoTokenizer.from_pretrained(str(out))
    assert module.config.problem_type == TASK
    assert module.config.id2label == {0: "a", 1: "b"}
    module.eval()
    texts = [row["text"] for row in rows()]
    with torch.no_grad():
        said = module(**tokenizer(texts, return_tensors="pt", padding=True, truncation=True)).logits
    ours = [[row["a"], row["b"]] for row in predict(finished, place / "rows.jsonl")["values"]]
    np.testing.assert_allclose(said.numpy(), ours, rtol=1e-5, atol=1e-6)
    assert "The outputs are in the units of the targets." in (out / "README.md").read_text()


def test_a_head_without_a_bias_takes_the_deviations_alone(place):
    keys = {"target_means": (2000.0, 0.0), "target_scales": (10.0, 0.001)}
    _, model = loaded(place, keys, name="llama")
    task, w = model.task.for_export(model, model.params())
    assert (task.target_means, task.target_scales) == (keys["target_means"], ())
    (name,) = (name for name in w if name.endswith("score.weight"))
    torch.testing.assert_close(w[name], model.params()[name] * torch.tensor([[10.0], [0.001]]))
    assert "Add [2000.0, 0.0] to the outputs" in task.about_outputs()


@pytest.mark.parametrize(
    ("dtype", "mean", "deviation", "held"),
    [
        ("float32", 2020.0, 3.0, True),
        ("float32", 1.7e9, 1e3, False),
        ("bfloat16", 2020.0, 3.0, False),
        ("bfloat16", 0.0, 3.0, True),
    ],
)
def test_an_export_keeps_the_bits_of_a_number_far_from_zero(place, tmp_path, dtype, mean, deviation, held):
    from transformers import AutoModelForSequenceClassification

    keys = {"target_means": (mean, -mean), "target_scales": (deviation, deviation), "dtype": dtype}
    table, model = loaded(place, keys, adaptation="head")
    w = model.params()
    task, _ = model.task.for_export(model, w)
    assert task.target_means == (() if held or not mean else keys["target_means"])
    write_model(model, w, "hf", tmp_path / "out")
    module = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    batch = model.prepare(table, range(8)).batch(range(8))
    with torch.no_grad():
        said = module(**{k: batch[k] for k in ("input_ids", "attention_mask")}).logits.double().numpy()
    ours = model.predict(model.prepare(table, range(8)), 8).double().numpy()  # in deviations
    theirs = (said + (task.target_means or 0.0) - [mean, -mean]) / deviation
    np.testing.assert_allclose(theirs, ours, atol=0.05 if dtype == "bfloat16" else 2e-3)


def test_an_attacker_shuffles_complete_rows_of_targets(place):
    table = load(place / "rows.jsonl", targets=("a", "b"), test_fraction=0)
    other = Regression().shuffle_targets(table, np.random.default_rng(0))
    assert other.targets.tolist() != table.targets.tolist()
    assert sorted(other.targets.tolist()) == sorted(table.targets.tolist())
    assert other.inputs == table.inputs


# --- silos and images -------------------------------------------------------------------------------------------------


def of_silo(place, name, model, classes=("value",), **columns):
    from fedfm.runtime.own_rows import OwnRows, populate

    known = {"features": {"kind": "features", "width": 4}, "text": {"kind": "text"}}[name]
    experiment = Experiment.from_dict(
        {
            "data": {"classes": list(classes), **known},
            "model": {"name": "features" if name == "features" else str(place / "bert"), "task": TASK, **model},
            "method": {"name": "fedavg", "rounds": 1},
            "run": {"engine": "deployment"},
        }
    )
    file = place / ("rows.npz" if name == "features" else "rows.jsonl")
    return populate(OwnRows("north", str(file), models=(str(place / "bert"),), columns=columns), experiment, classes)


def test_silos_take_a_fixed_scale(place):
    fixed = {"target_means": [50.0], "target_scales": [4.0]}
    found = of_silo(place, "features", fixed)
    assert (found.model.task.target_means, found.model.task.target_scales) == ((50.0,), (4.0,))
    assert of_silo(place, "features", {"scale_targets": False}).model.task.target_means == ()
    assert of_silo(place, "features", {}).model.task.target_means == ()  # until the scale of all silos comes
    with pytest.raises(InputError, match=r"2 numbers for 1 targets"):
        of_silo(place, "features", {"target_means": [1.0, 2.0], "target_scales": [1.0, 1.0]})


def test_a_silo_names_its_columns(place):
    fixed = {"target_means": [2000.0, 0.0], "target_scales": [10.0, 1.0], "adaptation": {"name": "head"}}
    assert of_silo(place, "text", fixed, ("a", "b"), targets=("a", "b")).federated.table.classes == ("a", "b")
    one = of_silo(place, "text", {"scale_targets": False, "adaptation": {"name": "head"}}, label="a")
    assert one.federated.table.classes == ("value",)  # whatever its column is called


def test_a_silo_checks_its_numbers(place, tmp_path):
    from fedfm.sites import silo_config

    file = tmp_path / "silo.toml"
    text = f'name = "north"\ndata = "{place / "rows.jsonl"}"\ntargets = ["a", "b"]\n'
    file.write_text(f'{text}task = "{TASK}"\n')
    assert silo_config.report(file)["classes"] == ["a", "b"]
    file.write_text(text)
    with pytest.raises(InputError, match=r'for numbers, set model\.task = "regression"'):
        silo_config.report(file)


@pytest.mark.proof
def test_images_are_learned_with_any_adaptation(tmp_path):
    rng = np.random.default_rng(0)
    shade = rng.uniform(40, 250, 40)
    noise = rng.uniform(0.5, 1, (40, 8, 8, 3))
    np.savez(tmp_path / "a.npz", x=(noise * shade[:, None, None, None]).astype(np.uint8), y=shade)
    for adaptation in ("head", "lora"):
        tables = {
            "data": {"path": str(tmp_path / "a.npz"), "partition": {"name": "iid", "clients": 2}},
            "model": {"name": "nano-vit", "task": TASK, "adaptation": {"name": adaptation}},
            "method": {"name": "fedavg", "local": {"name": "adamw", "batch_size": 8}},
            "run": {"seed": 1, "workers": 1},
        }
        tables["method"]["rounds"] = 8 if adaptation == "head" else 5
        tables["method"]["local"]["learning_rate"] = 0.01 if adaptation == "head" else 0.003
        result = run(tables, tmp_path / adaptation)
        assert result["details"]["r2"] > 0.3
        values = predict(tmp_path / adaptation, tmp_path / "a.npz")["values"]
        assert np.corrcoef(values, shade)[0, 1] > 0.5


# --- the plot ---------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(holders=st.lists(st.integers(0, 3), min_size=1, max_size=60), seed=st.integers(0, 2**32 - 1))
def test_the_plot_over_clients_is_that_of_their_rows(holders, seed):
    """Each point has the means of the rows whose predictions lie in one interval, in the users' units."""
    rng, n = np.random.default_rng(seed), len(holders)
    task, z, said = task_of(rng, 2), rng.normal(size=(n, 2)), 2 * rng.normal(size=(n, 2))
    y, y_said = (v * task.target_scales + task.target_means for v in (z, said))
    parts = [
        task.scores_of(None, Rows({"targets": torch.tensor(y[i])}), torch.tensor(said[i]))
        for i in (np.flatnonzero(np.array(holders) == client) for client in range(4))
    ]
    for j, groups in enumerate(task.plots(task.join_scores(parts), ("a", "b"))):
        assert sum(point[-1] for point in groups.points) == n
        places = np.clip(np.floor(said[:, j] * 4), -11, 10)
        assert len(groups.points) == len(set(places))
        for place, (x, true, low, high, rows) in zip(sorted(set(places)), groups.points, strict=True):
            mine = places == place
            assert (rows, x) == (mine.sum(), pytest.approx(y_said[mine, j].mean(), rel=1e-6))
            assert true == pytest.approx(y[mine, j].mean(), rel=1e-6)
            if rows == 1:
                assert low is high is None
            else:
                half = student.ppf(0.975, rows - 1) * y[mine, j].std(ddof=1) / np.sqrt(rows)
                assert high - low == pytest.approx(2 * half, rel=1e-3)
    silo = coarse(parts[0], task)
    assert "calibration" not in silo
    if silo["n"] >= task.least_rows:
        assert task.plots(task.join_scores([silo, *parts[1:]]), ("a", "b")) == []
    assert Regression().plots(task.join_scores(parts), ("a", "b")) == []  # without a scale the intervals mean nothing


def test_a_report_draws_predicted_and_true_values(place, tmp_path):
    run(experiment(place, data={"targets": ["a", "b"]}, rounds=1), tmp_path / "run")
    html = (tmp_path / "run" / "report.html").read_text()
    assert "<h3>Predicted and true values</h3>" in html
    assert html.count("a, means of groups of rows: predicted ") == 2  # on wide and on narrow screens
    run(experiment(place, model={"scale_targets": False}, rounds=0), tmp_path / "plain")
    assert "Predicted and true values" not in (tmp_path / "plain" / "report.html").read_text()
