"""Pairs: reading, the loss and the scores against sentence-transformers, candidates, runs, exports, refusals."""

import io
import json
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import tiny_text
from fedfm.api.execute import run
from fedfm.api.predict import export, predict
from fedfm.api.prediction_files import write
from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec
from fedfm.data.table import Table, fingerprint
from fedfm.errors import InputError
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.tasks import _pair_candidates, _pair_vectors
from fedfm.tasks._encoders import Pooling
from fedfm.tasks.embedding import Embedding
from small import jsonl

TASK = "embedding"
WORDS = [*tiny_text.COMMON, *" ".join(tiny_text.WORDS.values()).split()]


def rows(n=48, seed=0, negative=False, distinct=True):
    """The positive has the words of the anchor in another order."""
    rng, made = np.random.default_rng(seed), []
    while len(made) < n:
        words = [str(word) for word in rng.choice(WORDS, 5, replace=False)]
        row = {"anchor": " ".join(words), "positive": " ".join(reversed(words)), "who": "ns"[len(made) % 2]}
        if negative:
            row["negative"] = " ".join(str(word) for word in rng.choice(WORDS, 4))
        if not distinct or all(row["anchor"] != other["anchor"] for other in made):
            made.append(row)
    return made


def load(path, **keys):
    return load_table(DataSpec(path=str(path), **keys), seed=0, task=TASK)


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """Rows, a BERT without files of sentence-transformers, and one with them: the first token, norm 1."""
    folder = tmp_path_factory.mktemp("pairs")
    jsonl(folder / "rows.jsonl", rows())
    for name in ("bert", "st"):
        tiny_text.save_bert(folder / name)
    parts = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    listed = [{"idx": i, "name": str(i), "path": p, "type": f"s.m.{kind}"} for i, (p, kind) in enumerate(parts)]
    (folder / "st" / "modules.json").write_text(json.dumps(listed))
    (folder / "st" / "1_Pooling").mkdir()
    about = {"word_embedding_dimension": 16, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    (folder / "st" / "1_Pooling" / "config.json").write_text(json.dumps(about))
    return folder


@pytest.fixture(scope="session")
def vit(tmp_path_factory):
    from transformers import ViTConfig, ViTImageProcessor, ViTModel

    folder = tmp_path_factory.mktemp("pictures") / "vit"
    torch.manual_seed(3)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    ViTModel(ViTConfig(**shape, image_size=16, patch_size=8)).save_pretrained(folder)
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder)
    rng = np.random.default_rng(0)
    made = []
    for i in range(24):
        colour = rng.integers(0, 255, (4, 4, 3), dtype=np.uint8)
        for name, side in (("a", 16), ("b", 24)):
            Image.fromarray(colour).resize((side, side)).save(folder.parent / f"{i}{name}.png")
        made.append({"anchor": f"{i}a.png", "positive": f"{i}b.png"})
    jsonl(folder.parent / "pictures.jsonl", made)
    return folder


def model_of(folder, adaptation="full", **keys):
    spec = ModelSpec(str(folder), max_length=8, adaptation=AdaptationSpec(adaptation), **keys)
    return load_model(spec, classes=(), kind="pairs", task=TASK, seed=1)


def tables(place, source="rows.jsonl", model="bert", **changes):
    found = {
        "data": {"path": str(place / source), "partition": {"name": "iid", "clients": 2}},
        "model": {"name": str(place / model), "max_length": 8, "adaptation": {"name": "lora", "rank": 2}},
        "method": {"name": "fedavg", "rounds": 1, "local": {"name": "sgd", "learning_rate": 0.1, "batch_size": 8}},
        "run": {"seed": 1, "workers": 1},
    }
    for key, value in changes.items():
        table, _, name = key.partition("__")
        found.setdefault(table, {})[name] = value
    return found


# --- rows -------------------------------------------------------------------------------------------------------------


def test_columns_imply_the_task_and_files_give_the_same_rows(tmp_path):
    pandas = pytest.importorskip("pandas")
    made = [{k: v for k, v in row.items() if k != "who"} for row in rows(6, negative=True)]
    pandas.DataFrame(made).to_csv(tmp_path / "a.csv", index=False)
    pandas.DataFrame(made).to_parquet(tmp_path / "a.parquet")
    jsonl(tmp_path / "a.jsonl", made)
    loaded = [load_table(DataSpec(path=str(file), test_fraction=0), seed=0) for file in sorted(tmp_path.iterdir())]
    assert {table.kind for table in loaded} == {"pairs"}
    assert len({fingerprint(table) for table in loaded}) == 1
    assert loaded[0].inputs[0] == (made[0]["anchor"], made[0]["positive"], made[0]["negative"])


def test_images_come_from_paths_and_from_the_files_of_the_hub(vit, tmp_path):
    datasets = pytest.importorskip("datasets")
    paths = load(vit.parent / "pictures.jsonl", test_fraction=0)
    content = {
        name: [{"bytes": (vit.parent / f"{i}{end}.png").read_bytes(), "path": None} for i in range(24)]
        for name, end in (("anchor", "a"), ("positive", "b"))
    }
    kinds = datasets.Features({name: datasets.Image() for name in content})
    datasets.Dataset.from_dict(content, features=kinds).to_parquet(str(tmp_path / "a.parquet"))
    inside = load(tmp_path / "a.parquet", test_fraction=0)
    assert fingerprint(paths) == fingerprint(inside)
    assert "read as files of images" in paths.notices[0]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"anchor": "a", "positive": ""}, r'line 3: column "positive" is empty'),
        ({"anchor": None, "positive": "a"}, r'line 3: column "anchor" is empty'),
        ({"anchor": "a", "positive": ["b"]}, r'line 3: column "positive" holds list'),
        ({"anchor": 3, "positive": "b"}, r'line 3: column "anchor" holds int 3'),
        ({"anchor": "a", "positive": "b", "negative": "c"}, r'line 1: column "negative" is empty'),
    ],
)
def test_a_cell_of_another_form_is_refused_with_its_place(row, words, tmp_path):
    with pytest.raises(InputError, match=words):
        load(jsonl(tmp_path / "a.jsonl", [*rows(2), row, *rows(2)]))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"anchor": "0a.png", "positive": "no.png"}, r'line 2: column "positive": there is no file .*no\.png'),
        ({"anchor": "cut.png", "positive": "0b.png"}, r'line 2: column "anchor": .*cut\.png: '),
        ({"anchor": "0a.png", "positive": "x.jsonl"}, r'line 2: column "positive": .*not an image that can be read'),
    ],
)
def test_a_missing_or_damaged_image_is_refused_with_its_place(row, words, vit):
    (vit.parent / "cut.png").write_bytes((vit.parent / "1a.png").read_bytes()[:60])
    file = jsonl(vit.parent / "x.jsonl", [{"anchor": "1a.png", "positive": "1b.png"}, row])
    with pytest.raises(InputError, match=words):
        load(file)


def test_images_and_texts_are_not_compared(vit, tmp_path):
    with pytest.raises(InputError, match=r'"anchor" holds images and "positive" texts.*zero_shot'):
        load(jsonl(tmp_path / "a.jsonl", [{"anchor": "1a.png", "positive": "a dog"}] * 2))
    with pytest.raises(InputError, match=r'no column "positive"'):
        load(jsonl(tmp_path / "a.jsonl", [{"anchor": "a dog"}] * 8))


def test_rows_to_predict_are_anchors_or_texts(place, tmp_path):
    run(tables(place, method__rounds=0), tmp_path / "run")
    made = rows(3)
    forms = {"both": made, "anchors": [{"anchor": row["anchor"]} for row in made]}
    forms["texts"] = [{"text": row["anchor"], "id": i} for i, row in enumerate(made)]
    found = {name: predict(tmp_path / "run", jsonl(tmp_path / f"{name}.jsonl", of)) for name, of in forms.items()}
    assert found["both"]["embeddings"] == found["anchors"]["embeddings"] == found["texts"]["embeddings"]
    assert len(found["both"]["similarities"]) == 3
    assert found["texts"]["ids"] == ["0", "1", "2"]
    assert "similarities" not in found["texts"]
    write(found["texts"], tmp_path / "x.npz")
    with np.load(tmp_path / "x.npz", allow_pickle=False) as arrays:
        assert arrays["embeddings"].shape == (3, 16)
        assert arrays["embeddings"].dtype == np.float32
        assert arrays["id"].tolist() == ["0", "1", "2"]
    write(found["texts"], tmp_path / "x.csv")
    assert len((tmp_path / "x.csv").read_text().splitlines()) == 4
    with pytest.raises(InputError, match=r'no column "anchor"'):
        predict(tmp_path / "run", jsonl(tmp_path / "none.jsonl", [{"other": "a"}]))


def test_an_npz_of_rows_that_are_no_arrays_is_refused(tmp_path):
    with pytest.raises(InputError, match="'labels' are not an array"):
        write({"labels": [["a"], []]}, tmp_path / "a.npz")
    assert not (tmp_path / "a.npz").exists()


# --- loss -------------------------------------------------------------------------------------------------------------


def peer_of(model, pooling="mean"):
    """A model of sentence-transformers with the weights of ours."""
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling as TheirPooling

    transformer = Transformer(model.spec.name, max_seq_length=8, model_kwargs={"add_pooling_layer": False})
    transformer.model.load_state_dict(model.module.state_dict())
    return SentenceTransformer(modules=[transformer, TheirPooling(16, pooling_mode=pooling)], device="cpu")


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("name", ["bert", "st"])
def test_the_loss_is_that_of_sentence_transformers(name, negative, place, tmp_path):
    model = model_of(place / name)
    peer = peer_of(model, "cls" if name == "st" else "mean")
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    made = rows(12, negative=negative)
    table = load(jsonl(tmp_path / "a.jsonl", made), test_fraction=0)
    loss = model.loss(model.prepare(table, range(12)).batch(range(12)))
    peer.eval()
    keys = ("anchor", "positive", *(["negative"] if negative else []))
    theirs = MultipleNegativesRankingLoss(peer, scale=1 / 0.05)(
        [peer.preprocess([row[key] for row in made]) for key in keys], None
    )
    assert loss.item() == pytest.approx(theirs.item(), abs=1e-5)


def test_a_local_pass_is_that_of_the_trainer_of_sentence_transformers(place, tmp_path):
    """Plain SGD over all rows in one batch: both see the same batch, so that the weights agree."""
    pytest.importorskip("sentence_transformers")
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    made = tables(place, data__test_fraction=0.0, data__partition={"name": "iid", "clients": 1})
    made["model"]["adaptation"] = {"name": "full"}
    made["method"] |= {"rounds": 3, "local": {"name": "sgd", "learning_rate": 0.1, "batch_size": 64}}
    peer = peer_of(model_of(place / "bert"))
    for module in peer.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    data = Dataset.from_list([{"anchor": row["anchor"], "positive": row["positive"]} for row in rows()])
    how = {"output_dir": str(tmp_path / "t"), "optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant"}
    how |= {"per_device_train_batch_size": 64, "num_train_epochs": 3, "report_to": [], "save_strategy": "no"}
    arguments = SentenceTransformerTrainingArguments(**how, max_grad_norm=0.0, use_cpu=True, logging_steps=1)
    trainer = SentenceTransformerTrainer(peer, arguments, data, loss=MultipleNegativesRankingLoss(peer))
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    run(made, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["train_loss"] for line in lines[1:]] == pytest.approx(losses, abs=1e-5)


def test_equal_anchors_and_equal_positives_are_no_negatives(place, tmp_path):
    """Rows 0 and 1 share an anchor, 2 and 3 a positive, and the positive of 4 is the anchor of 5."""
    texts = [("old", "fish"), ("old", "bird"), ("wing", "sky"), ("nest", "sky"), ("leaf", "root"), ("root", "soil")]
    made = [{"anchor": anchor, "positive": positive} for anchor, positive in texts]
    model = model_of(place / "bert")
    table = load(jsonl(tmp_path / "a.jsonl", made), test_fraction=0)
    batch = model.prepare(table, range(6)).batch(range(6))
    logits = model.logits(batch)
    assert set(map(tuple, torch.nonzero(logits.isinf()).tolist())) == {(0, 1), (1, 0), (2, 3), (3, 2), (5, 4)}
    by_hand = torch.logsumexp(logits, 1) - logits.diagonal()
    assert model.loss(batch).item() == pytest.approx(by_hand.mean().item(), abs=1e-6)
    (line,) = model.task.forewarnings({"training": table, "test": table.take([])}, model.tools)
    assert line.startswith("4 of 6 training rows have the anchor or the positive of another row")


def test_a_batch_of_one_pair_has_the_loss_zero(place):
    model = model_of(place / "bert")
    loss = model.loss(model.prepare(load(place / "rows.jsonl"), [0]).batch([0]))
    loss.backward()
    assert loss.item() == 0


def test_pooling_by_hand():
    states = torch.tensor([[[1.0, 4.0], [3.0, 0.0], [9.0, 9.0]], [[1.0, 2.0], [2.0, 1.0], [0.0, 3.0]]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    right = {
        "mean": [[2.0, 2.0], [1.0, 2.0]],
        "cls": [[1.0, 4.0], [1.0, 2.0]],
        "max": [[3.0, 4.0], [2.0, 3.0]],
        "lasttoken": [[3.0, 0.0], [0.0, 3.0]],
    }
    for mode, found in right.items():
        assert _pair_vectors.pool(states, mask, Pooling(mode)).tolist() == found
    of_stages = states.mT.reshape(2, 2, 3, 1)  # (b, d, H, W)
    torch.testing.assert_close(_pair_vectors.pool(of_stages, None, Pooling()), states.mean(1))


# --- scores -----------------------------------------------------------------------------------------------------------


def test_scores_are_those_of_the_evaluator_of_sentence_transformers(place, tmp_path):
    """One set of all rows: a search among all positives."""
    model = model_of(place / "bert")
    peer = peer_of(model)
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    made = rows(40)
    table = load(jsonl(tmp_path / "a.jsonl", made), test_fraction=0)
    found = model.evaluate(model.prepare(table, range(40)))
    evaluator = InformationRetrievalEvaluator(
        {str(i): row["anchor"] for i, row in enumerate(made)},
        {str(i): row["positive"] for i, row in enumerate(made)},
        {str(i): {str(i)} for i in range(40)},
        mrr_at_k=[40],
        ndcg_at_k=[10],
        precision_recall_at_k=[1, 5],
        show_progress_bar=False,
    )
    theirs = {key.removeprefix("cosine_"): value for key, value in evaluator(peer).items()}
    assert 0 < found["recall_at_1"] < 1
    pairs = {"recall_at_1": "recall@1", "recall_at_5": "recall@5", "mrr": "mrr@40", "ndcg": "ndcg@10"}
    for ours, name in pairs.items():
        assert found[ours] == pytest.approx(theirs[name], abs=1e-9), name
    assert found["accuracy"] == found["recall_at_1"]


@settings(max_examples=40, deadline=None)
@given(data=st.data(), n=st.integers(1, 60), most=st.integers(2, 20), seed=st.integers(0, 99))
def test_a_row_has_the_same_candidates_at_every_evaluator(data, n, most, seed):
    made = rows(n, seed, negative=seed % 2 == 0, distinct=False)
    inputs = [tuple(row[key] for key in ("anchor", "positive", "negative") if key in row) for row in made]
    split = np.array([["val", "test"][i % 3 == 0] for i in range(n)])
    table = Table("pairs", inputs, None, (), split)
    order = data.draw(st.permutations(range(n)))
    shuffled = table.take(order)
    whole, other = _pair_candidates.TableSets(table, most), _pair_candidates.TableSets(shuffled, most)
    for at, i in enumerate(order):
        place, same = whole.place(i), other.place(at)
        cells = list(place.among.cells.values())
        assert cells[place.own] == inputs[i][1]
        left_out = {cells[k] for k in place.left_out}
        assert left_out == {row[1] for row in inputs if row[0] == inputs[i][0]} & {*cells} - {inputs[i][1]}
        if inputs.count(inputs[i]) == 1:
            assert (place.among.cells, place.own, place.left_out) == (same.among.cells, same.own, same.left_out)
    for name in ("val", "test"):
        sets = {whole.place(i).among for i in range(n) if split[i] == name}
        sizes = {among.size for among in sets}
        assert not sizes or (max(sizes) <= most and max(sizes) - min(sizes) <= 1)
        assert sum(among.size for among in sets) == (split == name).sum()


def test_clients_with_their_own_files_have_their_own_candidate_sets(place, tmp_path):
    for name, seed in (("north", 1), ("south", 2)):
        jsonl(tmp_path / f"{name}.jsonl", rows(30, seed))
    files = {name: str(tmp_path / f"{name}.jsonl") for name in ("north", "south")}
    table = load_table(DataSpec(clients=files), seed=0, task=TASK)
    of = _pair_candidates.sets_of(table, 100)
    sets = {(table.columns["client"][i], table.split[i], id(of.place(i).among)) for i in range(len(table))}
    assert len(sets) == 4


def test_ties_and_non_finite_cosines_count_as_wrong():
    inf, nan = -torch.inf, torch.nan
    logits = torch.tensor([[2.0, 1.0, inf], [1.0, 1.0, 0.0], [nan, nan, nan], [0.0, 3.0, 1.0], [1.0, nan, 0.0]])
    found = Embedding().figures_of(_pair_candidates.sums(logits, torch.tensor([0, 0, 0, 2, 0])))
    ranks = np.array([1, 2, 3, 2, 2])
    assert found["recall_at_1"] == pytest.approx((ranks == 1).mean())
    assert found["recall_at_5"] == 1
    assert found["mrr"] == pytest.approx((1 / ranks).mean())
    assert found["ndcg"] == pytest.approx((1 / np.log2(1 + ranks)).mean())
    assert found["loss"] is None


def test_candidates_are_computed_once_for_all_clients(place, monkeypatch):
    model, counted = model_of(place / "bert"), []
    table = load(place / "rows.jsonl", test_fraction=0)
    plain = type(model).in_batches
    monkeypatch.setattr(type(model), "in_batches", lambda *a: counted.append(len(a[1])) or plain(*a))
    parts = [model.prepare(table, range(i, 48, 4)) for i in range(4)]
    for part in parts:
        model.evaluate(part)
    assert counted == [12, 48, 12, 12, 12]
    with torch.no_grad():
        next(iter(model.live().values())).add_(0.1)
    model.evaluate(parts[0])
    assert counted[5:] == [12, 48]


# --- models -----------------------------------------------------------------------------------------------------------


def test_the_pooling_is_that_of_the_folder_and_belongs_to_the_fingerprint(place):
    mean, cls = model_of(place / "bert"), model_of(place / "st")
    assert any("has no modules.json" in line for line in mean.notices)
    assert any("the cls of its states, scaled to norm 1" in line for line in cls.notices)
    assert mean.fingerprint != cls.fingerprint
    assert not any("are not read" in line for line in cls.notices)
    assert not any("pooler" in name for name in mean.names)


@pytest.mark.parametrize(
    ("kinds", "pooling", "words"),
    [
        (("Transformer", "Pooling", "Dense"), {}, "the part Dense in its modules.json, which fedfm does not compute"),
        (("Transformer", "Pooling"), {"pooling_mode": "weightedmean"}, "pools by weightedmean"),
        (("Transformer", "Pooling"), {"pooling_mode": ["cls", "mean"]}, "pools by cls and mean"),
        (("Transformer", "Pooling"), None, r"has no 1_Pooling/config\.json"),
    ],
)
def test_parts_that_fedfm_does_not_compute_are_refused(kinds, pooling, words, tmp_path):
    tiny_text.save_bert(tmp_path)
    (tmp_path / "modules.json").write_text(json.dumps([{"path": "1_Pooling", "type": f"a.{kind}"} for kind in kinds]))
    (tmp_path / "1_Pooling").mkdir()
    if pooling is not None:
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    with pytest.raises(InputError, match=words):
        model_of(tmp_path)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prompts": {"query": "query: ", "document": ""}}, "such as 'query: ' (query), and fedfm writes none"),
        ({"prompts": {"query": "query: "}, "default_prompt_name": "query"}, 'writes its prompt "query" before each'),
        ({"similarity_fn_name": "dot"}, "compares vectors by dot (similarity_fn_name)"),
        ({"prompts": {"query": ""}, "default_prompt_name": None, "similarity_fn_name": "cosine"}, ""),
    ],
)
def test_settings_of_sentence_transformers_that_are_not_read_are_named(place, settings, words, tmp_path):
    folder = shutil.copytree(place / "st", tmp_path / "st")
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    found = [line for line in model_of(folder).notices if "fedfm" in line]
    assert [words in line for line in found] == ([True] if words else [])


def test_models_of_other_forms_are_refused(place, vit, tmp_path):
    from transformers import CLIPConfig, T5Config

    tiny_text.save_bert(tmp_path / "t5")  # for the tokenizer
    T5Config(decoder_start_token_id=0).save_pretrained(tmp_path / "t5")
    CLIPConfig().save_pretrained(tmp_path / "clip")
    for name, words in (("t5", "an encoder-decoder"), ("clip", "an encoder of texts and one of images")):
        with pytest.raises(InputError, match=words):
            model_of(tmp_path / name, weights="random")
    with pytest.raises(InputError, match=r"holds pairs of images, and the model of model\.name reads texts"):
        model_of(place / "bert").prepare(load(vit.parent / "pictures.jsonl"), [0])
    with pytest.raises(InputError, match=r"holds pairs of texts, and the model of model\.name reads images"):
        model_of(vit).prepare(load(place / "rows.jsonl"), [0])


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT on transformers 5
@pytest.mark.parametrize(("source", "adaptation"), [("bert", "full"), ("st", "lora")])
def test_an_export_gives_the_same_vectors_in_sentence_transformers(source, adaptation, place, tmp_path):
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import SentenceTransformer

    tables_ = tables(place, model=source, model__adaptation={"name": adaptation})
    tables_["method"]["local"] = {"name": "adamw", "learning_rate": 0.003, "batch_size": 8}
    result = run(tables_, tmp_path / "run")
    assert result["details"]["recall_at_1"] == result["accuracy"]
    vectors = np.array(predict(tmp_path / "run", place / "rows.jsonl")["embeddings"])
    texts = [row["anchor"] for row in rows()]
    export(tmp_path / "run", "hf", tmp_path / "hf")
    encoder = SentenceTransformer(str(tmp_path / "hf"), device="cpu")
    np.testing.assert_allclose(encoder.encode(texts), vectors, atol=1e-5)
    assert "sentence_pooling" not in (tmp_path / "hf" / "config.json").read_text()
    assert 'SentenceTransformer("FOLDER")' in (tmp_path / "hf" / "README.md").read_text()
    if adaptation == "lora":
        export(tmp_path / "run", "peft", tmp_path / "peft")
        encoder = SentenceTransformer(str(tmp_path / "peft" / "base"), device="cpu")
        encoder.load_adapter(str(tmp_path / "peft"))
        np.testing.assert_allclose(encoder.encode(texts), vectors, atol=1e-5)
        from peft import AutoPeftModelForFeatureExtraction

        assert AutoPeftModelForFeatureExtraction.from_pretrained(tmp_path / "peft")
        assert 'encoder.load_adapter("FOLDER")' in (tmp_path / "peft" / "README.md").read_text()


def test_pairs_of_images_are_learned_and_exported(vit, tmp_path):
    made = tables(vit.parent, "pictures.jsonl", "vit", model__adaptation={"name": "full"})
    made["method"] |= {"rounds": 2, "local": {"name": "adamw", "learning_rate": 0.01, "batch_size": 8}}
    result = run(made, tmp_path / "run")
    assert result["details"]["local_mrr"] == pytest.approx(result["details"]["mrr"])
    vectors = np.array(predict(tmp_path / "run", vit.parent / "pictures.jsonl")["embeddings"])
    export(tmp_path / "run", "hf", tmp_path / "hf")
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(str(tmp_path / "hf"), device="cpu")
    pictures = [Image.open(io.BytesIO((vit.parent / f"{i}a.png").read_bytes())).convert("RGB") for i in range(24)]
    np.testing.assert_allclose(encoder.encode(pictures), vectors, atol=1e-4)


def test_images_beyond_memory_are_read_for_each_batch(vit, monkeypatch):
    from fedfm.models import images

    model, table = model_of(vit), load(vit.parent / "pictures.jsonl", test_fraction=0)
    whole = model.prepare(table, range(8))
    monkeypatch.setattr(images, "AT_ONCE", 1)
    deferred = model.prepare(table, range(8))
    assert set(deferred.deferred) == {"anchor_pixels", "positive_pixels"}
    torch.testing.assert_close(model.loss(deferred.batch(range(8))), model.loss(whole.batch(range(8))))
    assert model.evaluate(deferred)["mrr"] == model.evaluate(whole)["mrr"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {
                "privacy": {
                    "unit": "record",
                    "mechanism": "dp_sgd",
                    "noise_multiplier": 1.0,
                    "clip_norm": 1.0,
                    "delta": 1e-3,
                }
            },
            "dp_sgd.*compares the rows of a batch",
        ),
        ({"method__local": {"name": "sgd", "micro_batch": 2, "batch_size": 8}}, "micro_batch: a contrastive loss"),
        ({"data__partition": {"name": "dirichlet", "alpha": 0.1, "clients": 2}}, "dirichlet"),
        ({"model__adaptation": {"name": "head"}}, "head"),
    ],
)
def test_unsuitable_settings_are_refused(changes, words, place, tmp_path):
    made = tables(place)
    for key, value in changes.items():
        table, _, name = key.partition("__")
        made[table] = value if not name else {**made[table], name: value}
    with pytest.raises(InputError, match=words):
        run(made, tmp_path / "run")


@pytest.mark.parametrize(
    "changes",
    [
        {"method__name": "ditto"},
        {"method__name": "centralised"},
        {"privacy": {"aggregator": "secagg"}, "data__partition": {"name": "iid", "clients": 3}},
        {"privacy": {"unit": "client", "noise_multiplier": 1.0, "clip_norm": 1.0, "delta": 1e-3}},
        {"attack": {"name": "label_shuffle", "fraction": 0.5}},
        {"data__val_fraction": 0.25, "run__patience": 1, "method__rounds": 3},
        {"data__partition": {"name": "by_column", "column": "who"}},
    ],
    ids=str,
)
def test_runs_with_several_methods_and_protections_work(changes, place, tmp_path):
    made = tables(place)
    for key, value in changes.items():
        table, _, name = key.partition("__")
        made[table] = value if not name else {**made.get(table, {}), name: value}
    result = run(made, tmp_path / "run")
    assert result["details"]["mrr"] > 0
    if "privacy" not in changes:
        assert result["details"]["local_mrr"] > 0
    if "run__patience" in changes:
        assert result["details"]["model_of_round"] <= 3
    html = (tmp_path / "run" / "report.html").read_text()
    assert "<h3>Recall at 1</h3>" in html
    assert "<h3>MRR</h3>" in html


def test_audits_of_rows_are_refused_with_the_reason(place, tmp_path):
    from fedfm.runtime.run_directory import Run

    run(tables(place), tmp_path / "run")
    from fedfm.audits.row_evidence import unreadable

    assert "a contrastive loss compares the rows of a batch" in str(unreadable(Run.open(tmp_path / "run")))
