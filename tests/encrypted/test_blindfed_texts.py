"""BlindFed on texts: whole runs in the clear and on ciphertexts, their plan, and what is refused."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

import fedfm
from fedfm.api.predict import predict
from fedfm.audits.audit import choose
from fedfm.core.client import ClientData
from fedfm.core.rows import Rows
from fedfm.core.tokens import Tokens
from fedfm.encrypted.protocol import text_rows
from fedfm.encrypted.protocol.client import ClientHalf
from fedfm.encrypted.protocol.handshake import Hello
from fedfm.encrypted.student.distil import distil
from fedfm.encrypted.student.folding import fold
from fedfm.encrypted.student.text_places import embedding_tables
from fedfm.errors import ClientFault, InputError
from fedfm.models.load import load_model
from fedfm.models.preprocessing import bare
from fedfm.models.spec import AdaptationSpec, ModelSpec
from small import pictures
from tiny_text import save_bert, texts

PLACES = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("blind-texts")
    save_bert(root / "bert")
    texts(root / "rows.jsonl")
    what = {
        "data": {"path": str(root / "rows.jsonl")},
        "model": {"name": str(root / "bert"), "max_length": PLACES},
        "distil": {"direct": True, "epochs": [0, 0, 0]},
    }
    distil(what, root / "student")
    return root


def experiment(folder, rows="rows.jsonl", **method):
    local = {"learning_rate": 0.3, "epochs": 5, "batch_size": 8}
    keys = {"name": "blindfed", "foundation": str(folder / "student"), "rounds": 5, "encryption": "clear"}
    return {
        "data": {"path": str(folder / rows), "partition": {"name": "iid", "clients": 2}},
        "method": keys | {"local": local} | method,
        "run": {"seed": 0, "workers": 1},
    }


def side_model(folder, **adapt):
    spec = ModelSpec(str(folder / "student"), adaptation=AdaptationSpec("side_adapter", **adapt))
    return load_model(spec, classes=("bird", "fish", "plant"), kind="text")


@pytest.mark.proof
def test_a_run_on_texts_in_the_clear_learns_and_predicts(folder, tmp_path):
    result = fedfm.run(experiment(folder), tmp_path / "run")
    assert result["accuracy"] > 0.7  # a third is guessing
    assert result["details"]["accuracy_clear"] == result["accuracy"]
    found = predict(tmp_path / "run", folder / "rows.jsonl")
    labels = [json.loads(line)["label"] for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert np.mean([a == b for a, b in zip(found["predictions"], labels, strict=True)]) > 0.7
    again = fedfm.run(experiment(folder), tmp_path / "again")
    assert again["params_sha256"] == result["params_sha256"]
    run = fedfm.load_run(tmp_path / "run")
    assert "server_view" in choose(run)
    assert "substitute_model" not in choose(run)
    with pytest.raises(InputError, match="it reads images, and this run has texts"):
        choose(run, ["substitute_model"])


def test_all_tokens_through_a_projection(folder, tmp_path):
    result = fedfm.run(experiment(folder, released="tokens", projection=4), tmp_path / "run")
    assert np.isfinite(result["loss"])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"protocol": "permuted"}, 'texts need protocol = "masked"'),
        ({"released": "grid"}, "texts have no quadrants"),
        ({"released": "tokens", "projection": 17}, "has 16 values per token"),
    ],
)
def test_settings_that_texts_do_not_support_are_refused_in_one_line(change, reason, folder, tmp_path):
    with pytest.raises(InputError, match=reason) as caught:
        fedfm.run(experiment(folder, **change), tmp_path / "run")
    assert "\n" not in str(caught.value)


def test_pictures_do_not_fit_a_model_of_texts(folder, tmp_path):
    pictures(folder, 20)
    with pytest.raises(InputError, match="does not fit data of kind image"):
        fedfm.run(experiment(folder, "pictures.npz"), tmp_path / "run")


def test_a_client_embeds_what_the_model_embeds(folder):
    """Its own tokenizer and tables give the student's states, and rows that are too long are named."""
    model = side_model(folder)
    hello = type("Hello", (), text_rows.embedding_fields(model) | {"tokens": PLACES})
    short, long = "the river under a grey sky", " ".join(["the river"] * 20)
    ids, lengths, cut = text_rows.token_ids([short, long], hello)
    assert lengths.tolist() == [7, PLACES]
    assert cut == [1]
    want = model.tools.tokenizer([short, long], truncation=True, max_length=PLACES)["input_ids"]
    assert [row[:n].tolist() for row, n in zip(ids, lengths, strict=True)] == want
    states = model.blocks(text_rows.rows_of(ids))
    x = text_rows.embed_ids(ids, lengths, hello.tables)
    torch.testing.assert_close(x[..., :-1].float(), states[0], rtol=1e-4, atol=1e-5)
    with pytest.raises(ClientFault, match="tokens that its table"):
        text_rows.embed_ids(ids + 40, lengths, embedding_tables(model.frozen_parts[0].module))
    with pytest.raises(ClientFault, match="takes texts"):
        text_rows.texts_of(Rows({"pixels": torch.zeros(2, 4, 4, 3)}))


def test_a_client_s_texts_are_bytes_and_long_ones_are_named(folder):
    from fedfm.data.load import load_table
    from fedfm.data.spec import DataSpec

    table = load_table(DataSpec(path=str(folder / "rows.jsonl")), seed=0, task="classification")
    table = replace(table, inputs=np.array(["Grüße", "the river " * 20, *table.inputs[2:]], dtype=object))
    rows = bare(table, [0, 1, 2])
    assert text_rows.texts_of(rows)[:2] == ["Grüße", "the river " * 20]
    said = []
    client = type("Client", (), {"log": staticmethod(said.append)})
    hello = type("Hello", (), text_rows.embedding_fields(side_model(folder)) | {"tokens": PLACES})
    text_rows.describe_rows(client, {"train": rows, "test": rows.take([])}, hello)
    assert said == [
        "1 of 3 rows are longer than the server's model reads, and are cut to 16 tokens: train row 2",
    ]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokenizer": "{}"}, "tokenizer cannot be read"),
        ({"tokenizer": "longer"}, "adds 17 tokens to a text, and a row has 16 places"),
        ({"tokenizer": "other"}, "tokens that its table of embeddings has not"),
        ({"tokenizer": "", "patch": [4, 4]}, "takes images"),
        ({"tokens": 2 * PLACES, "batch": 1}, "asks for 32 tokens a row, and its table has 16 positions"),
        ({"batch": 2 * 4096 // PLACES}, "512 rows of 16 tokens at a time; a ciphertext of its ring has 4096 places"),
        ({"batch": 0}, "batch = 0: expected at least 1"),
        ({"tables": "exchanged"}, "its table has 40 positions"),
        ({"tables": "word"}, "expected word"),
        ({"tables": "narrow"}, "of the same width"),
        ({"tables": "nan"}, "expected finite rows"),
    ],
)
def test_a_client_refuses_what_does_not_fit_before_it_keeps_anything(change, reason, folder):
    """A careless or hostile owner's hello is refused in one line, which depends on no row."""
    good = text_rows.embedding_fields(side_model(folder))
    word, position = good["tables"]["word"], good["tables"]["position"]
    tables = {
        "exchanged": {"word": position, "position": word},
        "word": {"word": word},
        "narrow": {"word": word[:, 1:], "position": position},
        "nan": {"word": word.clone().fill_(torch.nan), "position": position},
    }
    tokenizer = Tokenizer.from_str(good["tokenizer"])
    if change.get("tokenizer") == "other":
        tokenizer.add_tokens([f"word{i}" for i in range(len(word))])
    else:
        tokenizer.post_processor = TemplateProcessing(
            single=" ".join(["[CLS]"] * (PLACES + 1)) + " $A", special_tokens=[("[CLS]", 2)]
        )
    change = change | {key: tokenizer.to_str() for key in ("tokenizer",) if change.get(key) in ("other", "longer")}
    change = change | {"tables": tables[change["tables"]]} if "tables" in change else change
    fields = {"session": "00" * 16, "blocks": 2, "positions": 1, "width": 16, "rank": 4, "classes": ["a", "b"]}
    fields |= {"kernels": "exact", "batch": 4096 // PLACES, "tokens": PLACES, "patch": [], "extra": 0, "picture": {}}
    hello = Hello(**(fields | {"digest": "", "key": torch.zeros(32, dtype=torch.uint8)} | good | change))
    rows = Rows({}, tokens=Tokens.of([b"the river"]))
    client = SimpleNamespace(store={}, log=print, data=ClientData(lambda: rows, lambda: rows, lambda: rows))
    with pytest.raises(ClientFault, match=reason) as caught:
        ClientHalf("masked", "ckks").open(client, hello)
    assert "\n" not in str(caught.value)
    assert client.store == {}


def test_a_client_names_texts_that_the_tokenizer_does_not_know(folder):
    hello = SimpleNamespace(**text_rows.embedding_fields(side_model(folder)), tokens=PLACES)
    rows = Rows({}, tokens=Tokens.of([b"quite other words"]))
    said = []
    text_rows.describe_rows(SimpleNamespace(log=said.append), {"train": rows}, hello)
    assert said[0].startswith("3 of 4 tokens of the rows are unknown")
    hello.tokenizer = Tokenizer(BPE()).to_str()  # it has no token for what it does not know
    text_rows.describe_rows(SimpleNamespace(log=said.append), {"train": rows}, hello)
    assert len(said) == 1


@pytest.mark.proof
def test_an_encrypted_run_is_the_run_in_the_clear_and_costs_what_was_planned(folder, tmp_path):
    pytest.importorskip("tenseal.sealapi", reason='TenSEAL is absent: pip install "fedfm[encrypted]"')
    from fedfm.encrypted.inference.cost_estimate import plan

    clear = fedfm.run(experiment(folder), tmp_path / "clear")
    result = fedfm.run(experiment(folder, encryption="ckks"), tmp_path / "run")
    found = result["details"]
    assert found["max_error"] < 1e-3
    assert found["most_rows_left_out"] == 0
    assert found["statistical_distance"] < 2.0**-40
    assert result["accuracy"] == clear["accuracy"]
    names = ["ciphertext_weights", "encrypted_error", "other_clients", "server_view"]
    assert {finding.verdict for finding in fedfm.audit(tmp_path / "run", names)} == {"holds"}
    planned = plan(fold(side_model(folder).frozen_parts[0].module), [45, 45], "class")
    assert found["ciphertext_bytes"] == pytest.approx(planned.bytes_per_sample, rel=1e-3)
    assert found["refreshes"] == 2 * (planned.messages - 1 - 2) / 2  # rows and two disclosures are not refreshes
    assert found["statistical_distance"] == pytest.approx(planned.statistical_distance)


@pytest.mark.proof
def test_an_encrypted_batch_agrees_with_the_module_and_hides_lengths(folder):
    """All tokens through a projection, in one place; messages of short and of long rows have the same sizes."""
    pytest.importorskip("tenseal.sealapi", reason='TenSEAL is absent: pip install "fedfm[encrypted]"')
    from fedfm.encrypted.inference.model_owner import KeyHolder
    from fedfm.encrypted.protocol.masked import in_one_place

    model = side_model(folder, released="tokens", projection=3)
    ids = torch.randint(5, 30, (4, PLACES), generator=torch.Generator().manual_seed(0))
    for row, n in zip(ids, (1, 5, 8, PLACES), strict=True):
        row[n:] = -1
    rows = text_rows.rows_of(ids)
    got, want = in_one_place(model, rows).tensors["states"], model.states(rows)
    assert got.shape == (4, 2, PLACES, 3)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-3)
    holder = KeyHolder.new(PLACES)
    sizes = set()
    for n in (1, PLACES):
        holder.begin(bytes(16), bytes(32))
        x = text_rows.embed_ids(ids[3:], torch.tensor([n]), embedding_tables(model.frozen_parts[0].module))
        sizes.add(len(holder.rows(x.numpy())))
    assert len(sizes) == 1
