"""Predictions of a user's own language model: loss and perplexity of each row, answers where rows mark a prompt."""

import json
import math
import sys
import textwrap

import pytest
import torch
from torch.nn.functional import cross_entropy

import fedfm
import tiny_text
from fedfm.api.predict import predict
from fedfm.cli import main
from fedfm.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing`:FutureWarning")  # TRL sets the old name

ASKED = ["swim river the", "leaf of root near old", "a quiet wing", "small grey nest under", "soil"]
SAID = [" fish the", " plant", " bird of a bird", " river", " a"]
SCRIPT = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11)

        def forward(self, ids):
            return self.head(self.embed(ids))


    def loss(output, target):
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


    def rows(n, seed):
        ids = torch.randint(11, (n, 6), generator=torch.Generator().manual_seed(seed))
        return [(row[:-1], row[1:]) for row in ids]


    def pieces():
        torch.manual_seed(0)
        return {"model": Net(), "train": rows(24, 0), "test": rows(6, 1), "loss": loss}


    def new():
        return rows(4, 2)


    def asked():
        return [(x,) for x, _ in new()]
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    (tmp_path / "next_script.py").write_text(textwrap.dedent(SCRIPT))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    import next_script

    yield next_script
    sys.modules.pop("next_script", None)


def sft(folder, out, tokens=6):
    """An SFTTrainer of prompts and completions; its module writes at most so many tokens."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = Dataset.from_dict({"prompt": ASKED * 3, "completion": SAID * 3})
    config = trl.SFTConfig(
        output_dir=str(out), save_strategy="no", learning_rate=0.01, report_to=[], use_cpu=True, bf16=False, seed=7
    )
    module = AutoModelForCausalLM.from_pretrained(folder)
    module.generation_config.max_new_tokens = tokens
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return trl.SFTTrainer(module, args=config, train_dataset=rows, processing_class=tokenizer)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(the tiny LLaMA, a finished run of an SFTTrainer)."""
    folder = tmp_path_factory.mktemp("sft")
    llama = tiny_text.save_llama(folder / "llama")
    trainer = sft(llama, folder / "hf")
    fedfm.federate(trainer, clients={"a": trainer.train_dataset}, rounds=2, out=folder / "run", run={"workers": 1})
    return llama, folder / "run"


def test_an_sft_trainers_rows_have_answers_loss_and_perplexity(finished, tmp_path):
    llama, path = finished
    trainer = sft(llama, tmp_path / "hf")
    rows = trainer.train_dataset.select(range(5))
    found = predict(path, rows, given=trainer)  # the module has the trained weights now
    assert "outputs" not in found
    module, tokenizer = trainer.model.eval(), trainer.processing_class
    for i, row in enumerate(rows):
        ids = torch.tensor([row["input_ids"]])
        prompt = row["labels"].count(-100)
        with torch.no_grad():
            logits = module(ids).logits[0]
            by_hand = cross_entropy(logits[prompt - 1 : -1], ids[0, prompt:])
            said = ids[:, :prompt]
            for _ in range(6):  # greedy, without a cache
                said = torch.cat([said, module(said).logits[:, -1:].argmax(-1)], 1)
                if said[0, -1] == tokenizer.eos_token_id:
                    break
        assert found["losses"][i] == pytest.approx(float(by_hand), rel=1e-5)
        assert found["perplexities"][i] == pytest.approx(math.exp(by_hand), rel=1e-5)
        assert found["answers"][i] == tokenizer.decode(said[0, prompt:], skip_special_tokens=True)
        assert (i in found["cut"]) == (said[0, -1] != tokenizer.eos_token_id)
    assert found["loss"] == pytest.approx(sum(found["losses"]) / 5)
    assert found["answer_tokens"] == 6


def test_a_prompt_alone_is_answered(finished, tmp_path):
    llama, path = finished
    trainer = sft(llama, tmp_path / "hf")
    rows = trainer.train_dataset.select(range(5))
    whole = predict(path, rows, given=trainer)
    alone = [{k: row[k][: row["labels"].count(-100)] for k in ("input_ids", "labels")} for row in rows]
    found = predict(path, alone, given=trainer)
    assert found["answers"] == whole["answers"]
    assert found["losses"] == [None] * 5
    assert found["loss"] is None


def test_without_a_tokenizer_there_is_only_the_loss(finished, tmp_path):
    llama, path = finished
    trainer = sft(llama, tmp_path / "hf")
    trainer.processing_class = None
    found = predict(path, trainer.train_dataset.select(range(2)), given=trainer)
    assert "answers" not in found
    assert len(found["losses"]) == 2
    assert found["warnings"] == ["no answers: there is no tokenizer; give a Trainer with processing_class"]


def test_a_module_by_name_that_cannot_write(script, tmp_path, capsys):
    both = {"name": "next_script:pieces"}
    local = {"learning_rate": 0.5, "batch_size": 8}
    tables = {
        "data": both | {"partition": {"clients": 2}},
        "model": both,
        "method": {"name": "fedavg", "rounds": 2, "local": local},
        "run": {"workers": 1},
    }
    fedfm.run(tables, tmp_path / "run")
    assert main(["predict", "run", "next_script:new", "--out", "rows.jsonl"]) == 0
    told = capsys.readouterr()
    assert "no answers: the module has no generate(...) of transformers" in told.err
    net = script.pieces()["model"]
    from safetensors.torch import load_file

    net.load_state_dict(load_file(tmp_path / "run" / "adapter" / "model.safetensors"))
    by_hand = [script.loss(net(x[None]), y[None]).item() for x, y in script.new()]
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [line["row"] for line in lines] == [0, 1, 2, 3]
    assert [line["loss"] for line in lines] == pytest.approx(by_hand, rel=1e-5)
    assert [line["perplexity"] for line in lines] == pytest.approx([math.exp(x) for x in by_hand], rel=1e-5)
    assert f"perplexity {math.exp(sum(by_hand) / 4):.6g}" in told.out
    assert main(["predict", "run", "next_script:new"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["loss"] * 4 + ["perplexity"]
    with pytest.raises(InputError, match="the rows have no target"):
        predict(tmp_path / "run", "next_script:asked")
