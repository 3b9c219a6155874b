"""What a tokenizer writes for each token besides its number reaches the model, as in the model's own pipeline."""

import pytest
import torch
import transformers
from tiny_models import CLASSES, load, sentences

from fedfm.core.rows import Rows
from fedfm.core.tokens import Tokens
from fedfm.models import preparation, preprocessing
from fedfm.models.quiet import quiet

_SMALL = {"vocab_size": 64, "pad_token_id": 0}
SIZES = {
    "XLNet": {**_SMALL, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24, "summary_type": "first"},
    "Funnel": {**_SMALL, "block_sizes": [1, 1], "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 24},
    "Bert": {**_SMALL, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24},
}


@pytest.fixture(scope="module", params=SIZES)
def path(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = getattr(transformers, f"{request.param}Config")(**SIZES[request.param], num_labels=len(CLASSES))
        config.id2label = dict(enumerate(CLASSES))
        module = getattr(transformers, f"{request.param}ForSequenceClassification")(config)
        module.save_pretrained(folder)
        save_tokenizer(folder, kind=1 if request.param == "Bert" else 2)
    return folder


def save_tokenizer(folder, kind):
    from tiny_models import _SPECIAL, _WORDS
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    fast = Tokenizer(models.WordLevel({w: i for i, w in enumerate((*_SPECIAL, *_WORDS))}, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.post_processor = processors.TemplateProcessing(
        single=f"[CLS]:{kind} $A:0 [SEP]:0", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    names = ["input_ids", "token_type_ids", "attention_mask"]
    transformers.PreTrainedTokenizerFast(tokenizer_object=fast, model_input_names=names, **special).save_pretrained(
        folder
    )


def test_logits_are_those_of_the_models_own_pipeline(path):
    table = sentences()
    model = load(path, table, "full")
    for name, p in model.live().items():
        if p.dim() > 1 and "embed" not in name:
            p.data.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.3)
    with quiet():
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        pipe = transformers.pipeline("text-classification", model.module, tokenizer=tokenizer, top_k=None, device="cpu")
        theirs = [{one["label"]: one["score"] for one in pipe([text])[0]} for text in table.inputs]
    rows = model.prepare(table, range(len(table.inputs)))
    assert rows.token_arguments
    ours = [model.predict(rows.take([i])).softmax(-1)[0] for i in range(len(rows))]
    assert torch.allclose(torch.stack(ours), torch.tensor([[of[c] for c in CLASSES] for of in theirs]), atol=1e-6)
    bare = Rows(tokens=rows.tokens, labels=rows.labels, pad=rows.pad)
    if path.name.startswith(("XLNet", "Bert")):  # Funnel compares kinds, and those of a single text are alike
        assert not torch.allclose(model.predict(bare), model.predict(rows), atol=1e-3)
    assert bare.sha256() != rows.sha256()


def test_rows_keep_token_arguments_in_every_form():
    tokens, kinds = Tokens.of([[5, 6, 7], [8]]), Tokens.of([[2, 0, 1], [2]])
    rows = Rows(tokens=tokens, token_arguments={"token_type_ids": kinds})
    for of in (rows, rows.take([1, 0]).take([1, 0]), rows.to_padded()):
        assert of.batch([0, 1])["token_type_ids"].tolist() == [[2, 0, 1], [2, 0, 0]]
    assert rows.names == {"token_type_ids"}


def test_zeros_alone_are_left_out_and_other_kinds_change_the_preparation(tmp_path):
    found = {}
    for kind in (0, 2):
        save_tokenizer(tmp_path, kind)
        with quiet():
            tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
        found[kind] = preprocessing.token_argument_names(tokenizer), preparation._of_tokenizer(tokenizer)
    assert (found[0][0], found[2][0]) == ((), ("token_type_ids",))
    assert found[0][1] != found[2][1]
