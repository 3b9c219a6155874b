"""Token classification: entities by hand, scores that add up, files, cut words, runs and exports."""

import gzip
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from task_files import jsonl, loader

import tiny_text
from fedfm.api.execute import run
from fedfm.api.predict import predict
from fedfm.core import tasks
from fedfm.data.load import load_table
from fedfm.data.rows_to_predict import read_inputs
from fedfm.data.spec import DataSpec
from fedfm.data.table import fingerprint
from fedfm.errors import InputError
from fedfm.models import word_tokens
from fedfm.models.export import export
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.tasks._tags import count_begins, count_ends, spans
from fedfm.tasks.token_classification import TokenClassification

TASK = "token_classification"
load = loader(TASK)
ANIMALS = ("fish", "bird")
TEXTS = ("small grey fish", "old bird under sky", "leaf and root", "the quiet river fish", "a wing near the old bird")

# Spans that a reader of the scheme writes down: first word, the word behind the last, type.
BY_HAND = {
    "B-PER I-PER O B-LOC": [(0, 2, "PER"), (3, 4, "LOC")],
    "B-PER B-PER": [(0, 1, "PER"), (1, 2, "PER")],
    "I-PER I-PER B-PER I-PER": [(0, 2, "PER"), (2, 4, "PER")],  # IOB1: B- only where entities touch
    "I-PER I-LOC": [(0, 1, "PER"), (1, 2, "LOC")],
    "B-PER I-LOC I-LOC": [(0, 1, "PER"), (1, 3, "LOC")],
    "S-PER B-LOC I-LOC E-LOC S-PER": [(0, 1, "PER"), (1, 4, "LOC"), (4, 5, "PER")],  # BIOES
    "U-PER B-LOC L-LOC O": [(0, 1, "PER"), (1, 3, "LOC")],  # BILOU
    "E-PER E-PER I-PER": [(0, 1, "PER"), (1, 2, "PER"), (2, 3, "PER")],  # as conlleval reads it: E ends, so each begins
    "O I-A-B E-A-B": [(1, 3, "A-B")],
    "person person O person-artist": [(0, 2, "person"), (3, 4, "person-artist")],  # no prefixes
    "B I O S": [(0, 2, ""), (3, 4, "")],  # no types
    "O O": [],
}


def rows(n=30):
    made = []
    for i in range(n):
        words = f"{TEXTS[i % 5]} {TEXTS[i % 3]}".split()
        made.append({"tokens": words, "tags": ["B-ANIMAL" if w in ANIMALS else "O" for w in words]})
    return made


def conll(sentences):
    return "\n\n".join("\n".join(" ".join(cells) for cells in sentence) for sentence in sentences) + "\n"


@pytest.fixture(scope="session")
def bert(tmp_path_factory):
    return tiny_text.save_bert(tmp_path_factory.mktemp("words") / "bert")


@pytest.fixture
def model(bert):
    return load_model(
        ModelSpec(str(bert), max_length=8, adaptation=AdaptationSpec("lora", rank=2)),
        classes=("O", "B-ANIMAL", "I-ANIMAL"),
        kind="tagged",
        task=TASK,
    )


# --- entities ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tags", BY_HAND)
def test_entities_are_those_that_conlleval_finds(tags):
    assert spans(tags.split()) == BY_HAND[tags]


ENTITIES = st.lists(st.tuples(st.integers(1, 3), st.sampled_from(["PER", "LOC", None])), max_size=6)


@given(ENTITIES, st.sampled_from(["BIO", "IOB1", "BIOES", "BILOU", "BMES"]))
def test_entities_that_are_written_are_read(parts, scheme):
    """Each notation gives the same entities, and no notation alone looks like two."""
    tags, right, before = [], [], None
    single, inner, last = {"BMES": "SME", "BIO": "BII", "IOB1": "III", "BIOES": "SIE", "BILOU": "UIL"}[scheme]
    for length, name in parts:
        if name is not None:
            right.append((len(tags), len(tags) + length, name))
            first = single if length == 1 else "I" if scheme == "IOB1" else "B"
            first = "B" if scheme == "IOB1" and name == before else first
            marks = first + inner * (length - 2) + last * (length > 1)
            tags += [f"{mark}-{name}" for mark in marks]
        else:
            tags += ["O"] * length
        before = name
    assert spans(tags) == right
    assert 0 in count_ends([tags])
    assert 0 in count_begins([tags])


def test_sentences_in_bio_and_in_iob1_are_named(model, tmp_path):
    """Each silo may have its own notation."""
    bio, iob1 = ["B-A", "I-A", "O", "B-A"], ["I-A", "I-A", "O", "I-A"]

    def notation_notices(*sentences):
        table = load(jsonl(tmp_path / "a.jsonl", [{"tokens": ["x"] * len(of), "tags": of} for of in sentences]))
        return [text for text in model.task.forewarnings({"training": table}, model.tools) if "two notations" in text]

    assert not notation_notices(bio, bio)
    assert not notation_notices(iob1, iob1)
    (text,) = notation_notices(bio, iob1)
    assert text.startswith("2 of 4 entities begin with I-")


def test_a_file_of_several_columns_says_which_are_read(tmp_path):
    """Its last column need not be the tags, such as that of CoNLL-U."""
    (tmp_path / "a.conll").write_text(conll([[("1", "Ann", "NOUN", "_"), ("2", "ran", "VERB", "_")]] * 8))
    (tmp_path / "b.conll").write_text(conll([[("Ann", "B-P"), ("ran", "O")]] * 8))
    (text,) = (t for t in load(tmp_path / "a.conll").notices if "of 4 columns" in t)
    assert text.endswith('from "1 Ann NOUN _" the word "Ann" and the tag "_"')
    assert not any("columns" in t for t in load(tmp_path / "b.conll").notices)


# --- scores -----------------------------------------------------------------------------------------------------------


def scored(model, made, said, tmp_path):
    """Scores of a model that says these tags of the rows, and the same of two parts, join_scores."""
    table = load(jsonl(tmp_path / "scored.jsonl", made), test_fraction=0)
    prepared = model.prepare(table, range(len(table)))
    logits = torch.zeros(len(made), prepared.longest, len(model.classes))
    for i, tags in enumerate(said):
        for word, tag in enumerate(tags):
            logits[i, 1 + word, model.classes.index(tag)] = 2.0  # the tokenizer writes [CLS], then a token a word
    task = TokenClassification()

    def of(index):
        part, some = prepared.take(index), logits[index]
        given = SimpleNamespace(predict=lambda rows, size: some[:, : rows.longest], classes=model.classes)
        return task.scores(given, part)

    everything = list(range(len(made)))
    return of(everything), task.join_scores([of(everything[:1]), of(everything[1:]), task.join_scores([])])


def test_scores_are_those_counted_by_hand(model, tmp_path):
    right = [["B-ANIMAL", "I-ANIMAL", "O"], ["O", "B-ANIMAL"], ["B-ANIMAL"]]
    said = [["B-ANIMAL", "O", "O"], ["B-ANIMAL", "B-ANIMAL"], ["B-ANIMAL"]]
    made = [{"tokens": ["fish"] * len(tags), "tags": tags} for tags in right]
    whole, join_scores = scored(model, made, said, tmp_path)
    # 3 entities; 4 found: a span that is too short, one too many, and 2 that are right.
    by_hand = {"precision": 2 / 4, "recall": 2 / 3, "f1": 4 / 7, "accuracy": 4 / 6, "n": 3}
    e = torch.tensor(2.0).exp()
    by_hand["loss"] = float(-(4 * (e / (e + 2)).log() + 2 * (1 / (e + 2)).log()) / 6)
    for name, value in by_hand.items():
        assert whole[name] == pytest.approx(value, rel=1e-6), name
        assert join_scores[name] == pytest.approx(value, rel=1e-6), name


def test_without_entities_scores_are_zero_and_without_words_null(model, tmp_path):
    whole, _ = scored(model, [{"tokens": ["the"], "tags": ["O"]}] * 2, [["O"]] * 2, tmp_path)
    assert (whole["precision"], whole["recall"], whole["f1"], whole["accuracy"]) == (0, 0, 0, 1)
    none = TokenClassification().from_sums(dict.fromkeys(TokenClassification.sums, 0))
    assert set(none.values()) == {None}


# --- rows -------------------------------------------------------------------------------------------------------------


def test_forms_of_files_give_the_same_rows(tmp_path):
    pandas = pytest.importorskip("pandas")
    made = rows(6)
    text = conll([list(zip(row["tokens"], ["X"] * 99, row["tags"], strict=False)) for row in made])
    (tmp_path / "a.conll").write_text("-DOCSTART- X O\n\n" + text)
    (tmp_path / "a.txt").write_text(text.replace(" ", "\t").replace("\n", "\r\n"))
    (tmp_path / "b.iob2.gz").write_bytes(gzip.compress(("# a comment\n" + text).encode()))
    pandas.DataFrame(made).to_parquet(tmp_path / "a.parquet")
    jsonl(tmp_path / "a.jsonl", made)
    loaded = {file.name: load(file, test_fraction=0) for file in tmp_path.iterdir()}
    assert len({fingerprint(table) for table in loaded.values()}) == 1
    assert loaded["a.jsonl"].inputs[0] == (tuple(made[0]["tokens"]), tuple(made[0]["tags"]))
    assert loaded["a.jsonl"].classes == ("O", "B-ANIMAL")
    assert [loaded[name].notices for name in ("a.conll", "a.txt")] == [(), ()]
    (line,) = loaded["b.iob2.gz"].notices
    assert line.endswith("taken for comments and not read: 1 (they begin with # and have 3 columns, as words have)")


CORRECT = {  # files as their publishers have them
    "CoNLL-2003": "-DOCSTART- -X- -X- O\n\nEU NNP B-NP B-ORG\nrejects VBZ B-VP O\n\nfish NNP I-NP O\n",
    "GermEval": "#\thttp://a [2009-10-17]\n1\tEU\tB-ORG\n2\tsagt\tO\n\n1\tfish\tO\n2\tan\tO\n",
    "WNUT": "@a\tO\nEmpire\tB-location\n\nfish\tO\n",
    "CoNLL-U": "# sent_id = a b c\n1\tEU\tPROPN\tB-ORG\n2\tsays\tVERB\tO\n\n1\tfish\tNOUN\tO\n2\ta\tDET\tO\n",
}
DOUBTFUL = {  # what is guessed -> the notice
    "two columns of entities": ("a B-ORG O\nb O B-PER\n\nc O O\n", "of 3 columns"),
    "no tags at the end": ("a B-ORG x\nb O y\n\nc O x\n", "of 3 columns"),
    "a comment like a word": ("# note\na B-ORG\n\nb O\n", "taken for comments"),
}


@pytest.mark.parametrize(
    "text", [*CORRECT.values(), *(text for text, _ in DOUBTFUL.values())], ids=[*CORRECT, *DOUBTFUL]
)
def test_a_conll_file_is_remarked_on_where_something_is_guessed(text, tmp_path):
    (tmp_path / "a.conll").write_text(text)
    expected = [words for of, words in DOUBTFUL.values() if of == text]
    said = load(tmp_path / "a.conll", test_fraction=0).notices
    assert len(said) == len(expected)
    assert all(words in line for words, line in zip(expected, said, strict=True))


def test_a_folder_of_conll_files_has_their_splits(tmp_path):
    for name, n in (("train.txt", 6), ("valid.txt", 2), ("test.txt", 3)):
        text = conll([list(zip(row["tokens"], row["tags"], strict=True)) for row in rows(n)])
        (tmp_path / name).write_text(text)
    table = load(tmp_path)
    assert [len(table.rows(split)) for split in ("train", "val", "test")] == [6, 2, 3]


def test_words_alone_are_rows_to_predict_and_imply_no_tags(tmp_path):
    (tmp_path / "a.conll").write_text("small\nfish\n\nbird\n")
    table = read_inputs(tmp_path / "a.conll", DataSpec(path="a.conll"), kind="tagged")
    assert table.inputs == [(("small", "fish"), ()), (("bird",), ())]
    with pytest.raises(InputError, match=r'no column "tags"'):
        load(tmp_path / "a.conll")


def test_columns_imply_the_task(tmp_path):
    table = load_table(DataSpec(path=str(jsonl(tmp_path / "a.jsonl", rows(8)))), seed=0)
    assert tasks.implied_task(table.kind).name == TASK


def test_fingerprints_tell_words_apart(tmp_path):
    def of(*words):
        made = [{"tokens": list(words), "tags": ["O"] * len(words)}] * 2
        return fingerprint(load(jsonl(tmp_path / "a.jsonl", made)))

    assert len({of("ab", "c"), of("a", "bc"), of("abc", "d")}) == 3


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"tokens": ["a", "b"], "tags": ["O"]}, r'line 3: 2 words in "tokens" and 1 tags'),
        ({"tokens": "a b", "tags": ["O", "O"]}, r"line 3: .*a list of words is expected"),
        ({"tokens": ["a"], "tags": "O"}, r"line 3: .*a list of tags is expected"),
        ({"tokens": [], "tags": []}, r'line 3: column "tokens" is empty'),
        ({"tokens": ["a", ""], "tags": ["O", "O"]}, r'line 3: entry 1 of "tokens"'),
        ({"tokens": ["a"], "tags": [None]}, r'line 3: entry 0 of "tags"'),
        ({"tokens": ["a", "b"], "tags": [1, "O"]}, r"line 3: .*numbers and names"),
        ({"tokens": ["a"]}, r"line 3: .*a list of tags is expected"),
    ],
)
def test_a_row_of_another_form_is_refused_with_its_place(row, words, tmp_path):
    with pytest.raises(InputError, match=words):
        load(jsonl(tmp_path / "a.jsonl", [*rows(2), row, *rows(2)]))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a O\nb\n", r"line 2: 1 filled columns where line 1 has 2"),
        ("a X O\nb O\n", r"line 2: 2 filled columns where line 1 has 3"),
        ("# a comment\n\n-DOCSTART- O\n", r"holds no words"),
        ("a\tO\n\tO\n", r"line 2: 1 filled column"),
    ],
)
def test_a_broken_conll_file_is_refused_with_its_line(text, words, tmp_path):
    (tmp_path / "a.conll").write_text(text)
    with pytest.raises(InputError, match=words):
        load(tmp_path / "a.conll")


def test_a_word_may_be_a_hash(tmp_path):
    (tmp_path / "a.conll").write_text("# O\nfish B-ANIMAL\n\n# text = fish bird\nbird B-ANIMAL\n")
    assert load(tmp_path / "a.conll", test_fraction=0).inputs[0][0] == ("#", "fish")


# --- tokens -----------------------------------------------------------------------------------------------------------


def pieces_of(kind):
    """A tokenizer that cuts words into pieces, as BERT or as GPT-2 does."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    if kind == "word pieces":
        words = ["[UNK]", "[CLS]", "un", "##seen", "fish", "##y"]
        tokenizer = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    else:
        letters = {c: i for i, c in enumerate(["[UNK]", "[CLS]", "\u0120", *"abcdefghijklmnopqrstuvwxyz-"])}
        tokenizer = Tokenizer(models.BPE(letters, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[UNK]")


@pytest.mark.parametrize(
    ("kind", "places"),
    [
        ("word pieces", [{0: 1, 1: 3, 2: 5}]),  # [CLS] un ##seen fish ##y fish
        ("letters", [{0: 1, 1: 8, 2: 14}]),  # [CLS] u n s e e n _ f i s h y _ f: a blank is a token of its own
    ],
)
def test_a_word_is_where_its_first_token_is(kind, places):
    found = word_tokens.of([("unseen", "fishy", "fish")], SimpleNamespace(tokenizer=pieces_of(kind), max_length=32))
    assert found.places == places


def test_words_that_are_cut_off_have_no_target_and_are_counted(model, tmp_path):
    made = [{"tokens": ["fish"] * 10, "tags": ["B-ANIMAL"] * 10}, {"tokens": ["the"], "tags": ["O"]}] * 2
    table = load(jsonl(tmp_path / "a.jsonl", made), test_fraction=0)
    prepared = model.prepare(table, range(4))
    assert (prepared.tensors["targets"] != -100).sum(1).tolist() == [7, 1, 7, 1]
    said = model.task.forewarnings({"training": table.take([0, 1]), "test": table.take([2])}, model.tools)
    assert [line for line in said if line.startswith("6 of 21 words have no token among the 8 that are read")]


def test_a_batch_without_a_target_has_the_loss_zero(model, tmp_path):
    table = load(jsonl(tmp_path / "a.jsonl", [{"tokens": ["fish"], "tags": ["O"]}] * 2), test_fraction=0)
    batch = model.prepare(table, [0]).batch([0])
    batch["targets"] = torch.full_like(batch["targets"], -100)
    loss = model.loss(batch)
    loss.backward()
    assert loss.item() == 0


def test_tags_of_test_rows_alone_and_tags_without_a_prefix_are_named(model, tmp_path):
    made = [{"tokens": ["a"], "tags": [tag]} for tag in ("animal", "O", "plant")]
    table = load(jsonl(tmp_path / "a.jsonl", made), test_fraction=0)
    said = model.task.forewarnings({"training": table.take([0, 1]), "test": table.take([1, 2])}, model.tools)
    assert [line.partition(":")[0] for line in said] == [
        'the tag "plant" is in test rows alone',
        "no tag has a prefix such as B- or I-",
    ]


# --- runs -------------------------------------------------------------------------------------------------------------


def experiment(path, bert, method="fedavg", adaptation=None, rounds=6, **more):
    return {
        "data": {"path": str(path), "partition": {"name": "iid", "clients": 2}},
        "model": {
            "name": str(bert),
            "max_length": 10,
            "adaptation": adaptation or {"name": "lora", "rank": 4, "targets": "all-linear"},
        },
        "method": {
            "name": method,
            "rounds": rounds,
            "local": {"name": "adamw", "learning_rate": 0.03, "batch_size": 4},
        },
        "run": {"seed": 1, "workers": 1},
        **more,
    }


@pytest.mark.parametrize(
    ("method", "adaptation"),
    [
        ("fedavg", "lora"),
        ("fedbip", "lora"),
        pytest.param("fedavg", "full", marks=pytest.mark.proof),
        pytest.param("fedbip", "full", marks=pytest.mark.proof),
    ],
)
def test_a_run_learns_entities_and_predicts_a_tag_for_each_word(method, adaptation, bert, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", rows())
    result = run(experiment(path, bert, method, None if adaptation == "lora" else {"name": "full"}), tmp_path / "run")
    assert result["details"]["f1"] > 0.8
    new = jsonl(tmp_path / "new.jsonl", [{"tokens": ["the", "fish", *["and"] * 12]}, {"tokens": ["old", "bird"]}])
    found = predict(tmp_path / "run", new, None if method == "fedavg" else "client-00")
    assert [len(tags) for tags in found["tags"]] == [14, 2]
    assert found["tags"][0][9:] == [None] * 5
    assert found["words_cut"] == 5
    assert any("5 words have no token" in line for line in found["warnings"])
    for words, tags, entities in zip((["the", "fish"], ["old", "bird"]), found["tags"], found["entities"], strict=True):
        right = [(start, end, name) for start, end, name in spans([tag or "O" for tag in tags])]
        assert [(e["start"], e["end"], e["type"]) for e in entities] == right
        assert all(e["text"] == " ".join(words[e["start"] : e["end"]]) for e in entities if e["end"] <= 2)
    assert method != "fedavg" or found["tags"][0][:2] == ["O", "B-ANIMAL"]


@pytest.mark.proof
def test_rows_are_clipped_and_runs_stop_early(bert, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", rows())
    private = {"unit": "record", "mechanism": "dp_sgd", "noise_multiplier": 1.0, "clip_norm": 1.0, "delta": 1e-3}
    tables = experiment(path, bert, rounds=1, privacy=private)
    tables["method"]["local"] = {"name": "sgd", "learning_rate": 0.1, "batch_size": 8}
    assert run(tables, tmp_path / "private")["epsilon"] > 0
    tables = experiment(path, bert, rounds=6)
    tables["data"]["val_fraction"] = 0.2
    tables["run"]["patience"] = 1
    assert "model_of_round" in run(tables, tmp_path / "early")["details"]


def test_an_export_is_a_model_of_transformers_with_the_names_of_its_tags(model, tmp_path):
    from transformers import AutoModelForTokenClassification

    export(model, model.params(), "hf", tmp_path)
    there = AutoModelForTokenClassification.from_pretrained(tmp_path)
    assert there.config.id2label == {0: "O", 1: "B-ANIMAL", 2: "I-ANIMAL"}
    assert there.config.problem_type is None  # a row has several classes
    table = load(jsonl(tmp_path / "a.jsonl", rows(3)), test_fraction=0)
    prepared = model.prepare(table, range(3)).to_padded()
    batch = prepared.tensors
    with torch.no_grad():
        said = there(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    torch.testing.assert_close(said, model.predict(prepared), rtol=1e-4, atol=1e-5)
