"""How many tokens a model takes, and which: read from its module, for families that count positions differently."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save, save_tokenizer

from fedfm.cli import main
from fedfm.core.rows import Rows
from fedfm.core.tokens import Tokens
from fedfm.errors import InputError
from fedfm.models.load import load_model
from fedfm.models.quiet import quiet
from fedfm.models.spec import AdaptationSpec, ModelSpec

ENCODER = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
FAMILIES = {  # configuration, and how many of 40 positions hold tokens; None: it names no limit
    "Bert": ({}, 40),
    "XLMRoberta": ({"pad_token_id": 1}, 38),
    "MPNet": ({"pad_token_id": 1}, 38),
    "Longformer": ({"pad_token_id": 1, "attention_window": 8}, 38),
    "Esm": ({"pad_token_id": 0, "mask_token_id": 2}, 39),
    "OPT": ({"ffn_dim": 16, "word_embed_proj_dim": 16}, 40),
    "Yoso": ({}, 40),
    "XLNet": ({"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16}, None),
    "Bloom": ({"n_layer": 1, "n_head": 2}, None),
}


def family(name, folder, **changes):
    """A folder of a classifier of this family."""
    import transformers

    keys = ENCODER | {"vocab_size": 64, "max_position_embeddings": 40, "pad_token_id": 0} | FAMILIES[name][0] | changes
    if FAMILIES[name][1] is None:
        del keys["max_position_embeddings"]
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = getattr(transformers, f"{name}Config")(**keys, num_labels=2)
        transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def load(folder, kind="text", **keys):
    spec = ModelSpec(str(folder), **{"max_length": 100, "adaptation": AdaptationSpec("full"), **keys})
    return load_model(spec, classes=("a", "b") if kind == "text" else (), kind=kind)


@pytest.mark.parametrize("stated", [20, 39, 40, 100])
def test_a_tokenizer_that_states_fewer_tokens_than_rows_keep_is_said(stated, tmp_path):
    folder = family("Bert", tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": stated}))
    for asked in (20, 30, 128):
        model = load(folder, max_length=asked)
        kept = min(asked, 40)
        assert model.tools.max_length == kept
        said = [text for text in model.notices if f"states {stated} tokens" in text]
        assert [f"keep {kept}," in text for text in said] == ([True] if kept > stated else [])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_of_all_positions_computes_and_a_longer_one_does_not(name, tmp_path):
    model, most = load(family(name, tmp_path)), FAMILIES[name][1]
    assert model.tools.positions == most
    assert model.tools.max_length == (most or 100)
    assert [f"to {most}" in text for text in model.notices if "max_length" in text] == ([True] if most else [])

    def compute(length):
        return model.predict(Rows(tokens=Tokens.of([[7] * length, [8] * 3]), pad=model.tools.tokenizer.pad_token_id))

    assert compute(model.tools.max_length).isfinite().all()
    if most:
        with pytest.raises((RuntimeError, IndexError)):
            compute(most + 1)


def test_a_length_within_the_positions_is_not_told(tmp_path):
    folder = family("MPNet", tmp_path)
    for length in (38, ModelSpec("m").max_length):
        assert not [text for text in load(folder, max_length=length).notices if "model.max_length" in text]


def test_an_answer_needs_a_prompt(tmp_path):
    with pytest.raises(InputError, match=r"answer_tokens = 40: .* has 40 positions .* at most 39"):
        load(save("llama", tmp_path), "instruction", answer_tokens=40)


class TestTokens:
    def test_a_token_beyond_the_embedding_is_refused_with_its_row(self, tmp_path):
        from transformers import AutoTokenizer

        from fedfm.data.load import load_table
        from fedfm.data.spec import DataSpec

        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(save("bert", tmp_path))
            tokenizer.add_tokens([f"<new{i}>" for i in range(40)])
            tokenizer.save_pretrained(tmp_path)
        rows = [{"text": "the fox" + " <new39>" * (i == 5), "label": "ab"[i % 2]} for i in range(8)]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        model = load(tmp_path)
        table = load_table(DataSpec(path=str(tmp_path / "rows.jsonl")), seed=0, task=None)
        assert len(model.prepare(table, [0, 1, 7])) == 3
        number = len(tokenizer) - 1
        with pytest.raises(
            InputError, match=rf"rows.jsonl, row 6: .*<new39>.* {number};.* {number + 1} tokens.* 64 rows"
        ):
            model.prepare(table, [0, 5])

    def test_padding_that_the_embedding_lacks_is_refused(self, tmp_path):
        from transformers import AutoTokenizer

        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(save("gpt2", tmp_path))
            tokenizer.add_tokens([f"<new{i}>" for i in range(40)])
            tokenizer.pad_token = "<new39>"
            tokenizer.save_pretrained(tmp_path)
        with pytest.raises(InputError, match=r"the padding token '<new39>' .* 64 rows"):
            load(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_reported_with_its_file(value, tmp_path):
    file = save("bert", tmp_path) / "model.safetensors"
    state = load_file(file)
    name = next(n for n in state if n.endswith("layer.1.output.dense.weight"))
    state[name][2, 3] = value
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=rf"model\.safetensors: \S*layer\.1\.output\.dense\.weight\[2, 3\] is {value}"):
        load(tmp_path)


def test_a_damaged_shard_is_named(tmp_path):
    import transformers

    with quiet():
        module = transformers.BertModel(transformers.BertConfig(**ENCODER, vocab_size=64, max_position_embeddings=40))
        module.pooler.dense.bias.data[1] = float("nan")
        module.save_pretrained(tmp_path, max_shard_size="3KB")
    save_tokenizer(tmp_path)
    shards = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    with pytest.raises(InputError, match=rf"{shards['pooler.dense.bias']}: bert\.pooler\.dense\.bias\[1\] is nan"):
        load(tmp_path)


def test_a_model_that_cannot_compute_is_refused_by_check_and_run(tmp_path, capsys):
    """ALiBi of this family is made for a length that no key of ours knows."""
    import transformers

    folder = tmp_path / "mpt"
    with quiet():
        config = transformers.MptConfig(d_model=16, n_heads=2, n_layers=1, max_seq_len=12, vocab_size=64)
        transformers.MptForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)
    rows = [{"text": "the quick fox " * (1 + 4 * (i == 7)), "label": "ab"[i % 2]} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    file = tmp_path / "mpt.toml"
    file.write_text(
        f'[data]\npath = "{tmp_path}/rows.jsonl"\npartition = {{ name = "iid", clients = 2 }}\n[model]\n'
        f'name = "{folder}"\nadaptation = {{ name = "full" }}\n[method]\nname = "fedavg"\nrounds = 1\n'
    )
    for command in (["check", str(file)], ["run", str(file), "--out", str(tmp_path / "run")]):
        assert main(command) == 2
        assert "model.max_length = 128: " in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main(["check", str(file), "--set", "model.max_length=12"]) == 0
