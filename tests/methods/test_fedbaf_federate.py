"""FedBaF of a module given from Python: the same tensors mix, and to the same weights, as in an experiment's run."""

import copy
import json
import shutil

import numpy as np
import pytest
import torch
import transformers as t
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy

import fedfm
import tiny_text
from fedfm.config.experiment import Experiment
from fedfm.errors import InputError
from fedfm.models.quiet import quiet
from fedfm.runtime.population import populate
from small import pictures

VIT = {"intermediate_size": 16, "image_size": 16, "patch_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
KEY = bytes(range(32))


@pytest.fixture(autouse=True)
def one_key(monkeypatch):
    """The draw of alpha is the same in every run."""
    monkeypatch.setattr("fedfm.runtime.client_memory.entropy", lambda n: KEY[:n])


def vit(folder, width=8, labels=4, **shape):
    """A random ViT classifier as a folder."""
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(width)
        config = t.ViTConfig(**{**VIT, **shape}, hidden_size=width, num_labels=labels)
        t.ViTForImageClassification(config).save_pretrained(folder)
        from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

        ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)
    return folder


def bert(folder, width=16):
    tiny_text.save_bert(folder)
    with quiet():
        still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # an experiment trains without
        config = t.BertConfig.from_pretrained(folder, hidden_size=width, num_labels=3, **still)
        torch.manual_seed(width)
        t.BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def llama(folder, width=16):
    tiny_text.save_llama(folder)
    with quiet():
        torch.manual_seed(width)
        t.LlamaForCausalLM(t.LlamaConfig.from_pretrained(folder, hidden_size=width)).save_pretrained(folder)
    return folder


def tables(folder, model, foundation, **keys):
    """An experiment of two rounds over two clients; plain SGD, all weights."""
    kind = "vit" if "vit" in model.name else "bert" if "bert" in model.name else "llama"
    path = pictures(folder) if kind == "vit" else tiny_text.texts(folder / "rows.jsonl")
    return {
        "data": {"path": str(path), "partition": {"name": "iid", "clients": 2}},
        "model": {
            "name": str(model),
            "adaptation": {"name": "full"},
            "task": "language_modelling" if kind == "llama" else "classification",
        },
        "method": {
            "name": "fedbaf",
            "foundation": str(foundation),
            "rounds": 2,
            "local": {"learning_rate": 0.05, "batch_size": 8},
            **keys,
        },
        "run": {"seed": 1, "workers": 1},
    }


def both(folder, model, foundation, **keys):
    """(matching, weights) of the run of an experiment, and of its rows and its start given to federate."""
    table = tables(folder, model, foundation, **keys)
    experiment = Experiment.from_dict(copy.deepcopy(table))
    result = fedfm.run(table, folder / "toml")
    here = populate(experiment)
    clients = {}
    for c in here.clients:
        rows = here.data(c).train
        batches = [rows.batch([i]) for i in range(len(rows))]
        keep = ("pixel_values", "input_ids", "attention_mask", "labels")
        clients[c] = [{k: v[0] for k, v in batch.items() if k in keep} for batch in batches]
    module, collate = here.model.module, None
    if here.model.is_language_model:
        pad = here.model.tools.tokenizer.pad_token_id

        def collate(rows):
            long = nn.utils.rnn.pad_sequence
            ids = long([r["input_ids"] for r in rows], batch_first=True, padding_value=pad)
            mask = long([r["attention_mask"] for r in rows], batch_first=True)
            return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    elif "bert" in model.name:

        def collate(rows):
            long = nn.utils.rnn.pad_sequence
            return {
                "input_ids": long([r["input_ids"] for r in rows], batch_first=True),
                "attention_mask": long([r["attention_mask"] for r in rows], batch_first=True),
                "labels": torch.stack([r["labels"] for r in rows]),
            }

    given = {k: v for k, v in table["method"].items() if k not in ("name", "rounds", "local")}
    again = fedfm.federate(
        module,
        clients=clients,
        collate=collate,
        method="fedbaf",
        rounds=2,
        local=table["method"]["local"],
        seed=1,
        run={"workers": 1},
        out=folder / "given",
        **given,
    )
    weights = [load_file(folder / name / "adapter" / "model.safetensors") for name in ("toml", "given")]
    return (result["details"]["matching"], weights[0]), (again["details"]["matching"], weights[1])


class TestLikeAnExperiment:
    @pytest.mark.each_value
    @pytest.mark.parametrize("make", [vit, bert, llama])
    @pytest.mark.parametrize("declared", [(), ("labels", "vocabulary")])
    @pytest.mark.parametrize("wider", [False, True])
    def test_the_same_tensors_mix_to_the_same_weights(self, tmp_path, make, declared, wider):
        own = make(tmp_path / f"{make.__name__}-own")
        foundation = make(
            tmp_path / "foundation", 2 * (8 if make is vit else 16) if wider else 12 if make is vit else 16
        )
        (matching, w), (again, v) = both(tmp_path, own, foundation, identical=declared)
        assert again == matching
        assert bool(matching["left_out"]) or declared
        assert set(v) == set(w)
        for name, tensor in w.items():
            torch.testing.assert_close(v[name], tensor, rtol=1e-4, atol=2e-5)


# --- modules of one's own ---------------------------------------------------------------------------------------------


class Patches(nn.Module):
    """A small vision transformer as a script writes one; nothing in it has a name that transformers gives."""

    def __init__(self, width=8, classes=3, side=16):
        super().__init__()
        self.patch = nn.Conv2d(3, width, 8, 8)
        self.cls = nn.Parameter(torch.randn(1, 1, width))
        self.pos_embed = nn.Parameter(torch.randn(1, (side // 8) ** 2 + 1, width))
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(2))
        self.answer = nn.Linear(width, classes)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos_embed
        for block in self.blocks:
            x = x + block(x)
        return self.answer(x[:, 0])


class Words(nn.Module):
    """A small recurrent language model; the last layer registered is not the one that answers."""

    def __init__(self, width=8, words=20):
        super().__init__()
        self.out = nn.Linear(width, words)
        self.table = nn.Embedding(words, width)
        self.position = nn.Embedding(6, width)
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return self.out(torch.tanh(self.inner(self.table(x) + self.position(torch.arange(x.shape[1])))))


def next_word(output, target):
    return cross_entropy(output[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def trained(folder, module):
    """The folder of a module, as a run of federate leaves it: the foundation of another."""
    from safetensors.torch import save_file

    folder.mkdir()
    save_file({n: p.detach().contiguous() for n, p in module.named_parameters()}, folder / "model.safetensors")
    (folder / "fedfm.json").write_text(json.dumps({}))
    return folder


def left_out(folder, module, foundation, rows, loss=cross_entropy, **keys):
    shutil.rmtree(folder / "run", ignore_errors=True)
    settings = {"method": "fedbaf", "rounds": 1, "run": {"workers": 1}, "out": folder / "run", "loss": loss}
    clients = {"a": rows[:6], "b": rows[6:]}
    result = fedfm.federate(module, clients=clients, foundation=str(foundation), **settings, **keys)
    reasons = {name: why for why, names in result["details"]["matching"]["left_out"].items() for name in names}
    return reasons, result


def drawings():
    rng = np.random.default_rng(0)
    return [(torch.from_numpy(rng.normal(size=(3, 16, 16)).astype("f")), i % 3) for i in range(12)]


def verses():
    rng = np.random.default_rng(0)
    return [(x, x) for x in (torch.from_numpy(rng.integers(0, 20, 6)) for _ in range(12))]


class TestModulesOfOnesOwn:
    def test_a_head_is_mixed_only_where_labels_are_declared(self, tmp_path):
        foundation = trained(tmp_path / "foundation", Patches())
        reasons, _ = left_out(tmp_path, Patches(), foundation, drawings())
        assert reasons == dict.fromkeys(
            ("answer.weight", "answer.bias"),
            'labels: not declared identical; method.identical = ["labels"] declares it',
        )
        reasons, _ = left_out(tmp_path, Patches(), foundation, drawings(), identical=("labels",))
        assert reasons == {}

    def test_first_layer_tokens_positions_and_head_are_never_sliced(self, tmp_path):
        foundation = trained(tmp_path / "foundation", Patches(width=12, classes=5))
        reasons, result = left_out(tmp_path, Patches(), foundation, drawings(), identical=("labels",))
        assert set(reasons) == {"patch.weight", "patch.bias", "cls", "pos_embed", "answer.weight", "answer.bias"}
        assert reasons["pos_embed"] == "position table of another shape: never sliced"
        assert result["details"]["matching"]["tensors"] == 8  # the blocks, sliced

    def test_words_are_mixed_only_where_the_vocabulary_is_declared(self, tmp_path):
        foundation = trained(tmp_path / "foundation", Words())
        reasons, _ = left_out(tmp_path, Words(), foundation, verses(), next_word)
        assert set(reasons) == {"table.weight", "out.weight", "out.bias"}
        assert all(why.startswith("vocabulary: not declared identical") for why in reasons.values())
        foundation = trained(tmp_path / "wide", Words(width=12))
        reasons, _ = left_out(tmp_path, Words(), foundation, verses(), next_word, identical=("vocabulary",))
        assert set(reasons) == {"table.weight", "position.weight", "out.weight"} | {"out.bias"}

    def test_an_output_layer_without_classes_is_recognised(self, tmp_path):
        def coder(width):
            return nn.Sequential(nn.Linear(4, width), nn.Linear(width, width), nn.Linear(width, 4))

        rows = [(x, x) for x in torch.randn(12, 4, generator=torch.Generator().manual_seed(0))]
        same, wide = trained(tmp_path / "same", coder(6)), trained(tmp_path / "wide", coder(9))
        assert left_out(tmp_path, coder(6), same, rows, nn.functional.mse_loss)[0] == {}
        reasons, _ = left_out(tmp_path, coder(6), wide, rows, nn.functional.mse_loss)
        assert set(reasons) == {"0.weight", "0.bias", "2.weight", "2.bias"}
        assert reasons["2.weight"] == "output layer of another shape: never sliced"

    def test_a_layer_alone_is_a_head(self, tmp_path):
        rows = [(torch.tensor([i, 1.0, -i]), i % 2) for i in range(12)]
        foundation = trained(tmp_path / "foundation", nn.Linear(3, 2))
        with pytest.raises(InputError, match=r"no tensor matches the model: labels: not declared identical"):
            left_out(tmp_path, nn.Linear(3, 2), foundation, rows)

    def test_a_folder_of_transformers_is_not_for_them(self, tmp_path):
        with pytest.raises(InputError, match=r"a user's own module needs the folder of its trained weights"):
            left_out(tmp_path, Patches(), vit(tmp_path / "vit"), drawings())


# --- what a folder is -------------------------------------------------------------------------------------------------


class TestFolders:
    @pytest.mark.parametrize("other", [bert, llama])
    def test_a_model_of_text_is_none_of_pictures_and_the_other_way_round(self, tmp_path, other):
        """Whatever else lies in the folder: a ViT has no tokenizer, and needs none to be told from a text model."""
        text, image = other(tmp_path / other.__name__), vit(tmp_path / "vit")
        table = tables(tmp_path, text, image)
        with pytest.raises(InputError, match=rf"vit: a model of type 'vit' does not match one of type '{text.name}'"):
            fedfm.run(table, tmp_path / "a")
        with pytest.raises(InputError, match=rf"a model of type '{text.name}' does not match one of type 'vit'"):
            fedfm.run(tables(tmp_path, image, text), tmp_path / "b")
        table["model"]["name"] = str(image)
        with pytest.raises(InputError, match=r"is of type 'vit', which reads images: it does not fit data of kind"):
            fedfm.run(table, tmp_path / "c")
        swapped = tables(tmp_path, image, image)
        swapped["model"]["name"] = str(text)
        reads = rf"is of type '{text.name}', which reads text: it does not fit data of kind image"
        with pytest.raises(InputError, match=reads):
            fedfm.run(swapped, tmp_path / "d")
        with quiet():
            module = t.ViTForImageClassification.from_pretrained(image)
        rows = [{"pixel_values": x, "labels": y} for x, y in drawings()]
        with pytest.raises(InputError, match=rf"a model of type '{text.name}' does not match one of type 'vit'"):
            left_out(tmp_path, module, text, rows, None)

    def test_a_model_that_sees_ahead_predicts_no_next_word(self, tmp_path):
        table = tables(tmp_path, llama(tmp_path / "llama"), "nano-vit")
        table["model"]["name"] = str(bert(tmp_path / "bert"))
        table["method"] = {"name": "fedavg"}
        with pytest.raises(InputError, match=r"'bert', which sees the words that it predicts.*a causal model"):
            fedfm.run(table, tmp_path / "run")

    def test_weights_that_a_folder_does_not_hold_are_not_drawn(self, tmp_path):
        """A ViT saved without a head: what transformers would make up for it is not a secret, and does not mix."""
        with quiet():
            t.ViTModel(t.ViTConfig(**VIT, hidden_size=8)).save_pretrained(tmp_path / "bare")
            module = t.ViTForImageClassification(t.ViTConfig(**VIT, hidden_size=8, num_labels=2))
        rows = [{"pixel_values": x, "labels": y % 2} for x, y in drawings()]
        reasons, _ = left_out(tmp_path, module, tmp_path / "bare", rows, None, identical=("labels",))
        assert reasons == dict.fromkeys(
            ("classifier.weight", "classifier.bias"), "the foundation model has no such tensor"
        )

    def test_names_and_modules_in_each_others_place_are_refused(self, tmp_path):
        with pytest.raises(InputError, match=r"model is a str: .*; load it, e\.g\. with from_pretrained"):
            left_out(tmp_path, str(tmp_path), "x", drawings())
        with pytest.raises(InputError, match=r"foundation: this is a module; expected a built-in name, a folder"):
            fedfm.federate(Patches(), clients={"a": drawings()}, method="fedbaf", foundation=Patches())
