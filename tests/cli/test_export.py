"""An exported folder: its card, and predictions with the ids of rows."""

import csv
import json
import os
import signal
import sys

import pytest

import fedfm
import small
import tiny_text
from fedfm.api.predict import export, predict
from fedfm.cli import main
from fedfm.models.quiet import quiet
from fedfm.runtime.progress import Progress


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of LoRA on a small BERT, with a class whose name is markup."""
    folder = tmp_path_factory.mktemp("export")
    tiny_text.save_bert(folder / "bert")
    rows = tiny_text.texts(folder / "rows.jsonl", n=40).read_text().replace('"fish"', '"fi|sh`"')
    (folder / "rows.jsonl").write_text(rows)
    tables = {
        "data": {"path": str(folder / "rows.jsonl"), "partition": {"name": "iid", "clients": 2}},
        "model": {"name": str(folder / "bert"), "max_length": 9, "adaptation": {"name": "lora", "rank": 2}},
        "method": {"name": "fedavg", "rounds": 1},
        "run": {"workers": 1},
    }
    fedfm.run(tables, folder / "run", progress=Progress())
    return folder / "run"


def test_a_folder_of_peft_predicts_as_the_run_does(run, tmp_path):
    from peft import AutoPeftModelForSequenceClassification
    from transformers import AutoTokenizer

    with quiet():
        export(run, "peft", tmp_path / "out")
        model = AutoPeftModelForSequenceClassification.from_pretrained(str(tmp_path / "out")).eval()
        tokenizer = AutoTokenizer.from_pretrained(str(tmp_path / "out"))
    assert tokenizer.model_max_length == 9
    rows = [json.loads(line) for line in (run.parent / "rows.jsonl").read_text().splitlines()]
    batch = tokenizer([row["text"] for row in rows], truncation=True, padding=True, return_tensors="pt")
    named = [model.config.id2label[i] for i in model(**batch).logits.argmax(1).tolist()]
    assert named == predict(run, run.parent / "rows.jsonl")["predictions"]


@pytest.mark.parametrize("to", ["peft", "hf", "torch"])
def test_an_export_that_is_killed_before_its_card_leaves_no_model_and_can_be_repeated(to, run, tmp_path):
    out = tmp_path / "out"
    pid = os.fork()
    if not pid:

        def kill(event, args):
            if event == "open" and str(args[0]).endswith("README.md") and args[1] == "w":
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill)
        os._exit(main(["export", str(run), "--to", to, "--out", str(out)]))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert not [path for path in out.iterdir() if not path.name.startswith(".")]
    with quiet():
        export(run, to, out)
        export(run, to, tmp_path / "other")
    both = [sorted(str(path.relative_to(f)) for path in f.rglob("*")) for f in (out, tmp_path / "other")]
    assert both[0] == both[1]


def test_the_card_says_what_the_run_was(run, tmp_path):
    with quiet():
        export(run, "hf", tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    result = fedfm.load_run(run).manifest["result"]
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: text-classification\n")
    assert "`bird`, `fi|sh'`, `plant`" in card
    assert "| task | classification |" in card
    assert "| data | rows.jsonl \\(iid\\) at 2 clients |".replace("\\", "") in card
    assert f"| accuracy | {result['accuracy']:.4g} |" in card
    assert result["params_sha256"] in card
    assert "No differential privacy is claimed" in card
    assert str(run.parent) not in card  # no path of this machine
    assert "bert, adapted by fedfm" in card


def test_the_card_of_a_private_run_has_its_epsilon(tmp_path):
    private = {"unit": "client", "clip_norm": 1.0, "noise_multiplier": 5.0, "delta": 1e-5}
    tables = small.experiment(tmp_path, method={"rounds": 1, "fraction": 1.0}, privacy=private)
    result = fedfm.run(tables, tmp_path / "run", progress=Progress())
    export(tmp_path / "run", "torch", tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    assert f"epsilon = {result['epsilon']:.4g}" in card
    assert "library_name: pytorch" in card


def test_predictions_have_the_ids_of_rows(run, tmp_path, capsys):
    rows = [json.loads(line) for line in (run.parent / "rows.jsonl").read_text().splitlines()][:4]
    file = tmp_path / "new.csv"
    with file.open("w", newline="") as opened:
        table = csv.DictWriter(opened, ["id", "text"])
        table.writeheader()
        table.writerows({"id": f"patient-{9 - i}", "text": row["text"]} for i, row in enumerate(rows))
    assert main(["predict", str(run), str(file), "--out", str(tmp_path / "out.csv")]) == 0
    with (tmp_path / "out.csv").open(newline="") as opened:
        found = list(csv.DictReader(opened))
    assert [(row["row"], row["id"]) for row in found] == [(str(i), f"patient-{9 - i}") for i in range(4)]
    assert [row["prediction"] for row in found] == predict(run, file)["predictions"]


def test_an_export_of_a_head_scales_vectors_as_the_run_did(tmp_path):
    tables = small.experiment(tmp_path, method={"rounds": 1})
    fedfm.run(tables | {"data": tables["data"] | {"scale": "row"}}, tmp_path / "run", progress=Progress())
    export(tmp_path / "run", "torch", tmp_path / "out")
    assert json.loads((tmp_path / "out/fedfm.json").read_text())["scale"] == "row"
    assert "keepdim" in (tmp_path / "out/README.md").read_text()
