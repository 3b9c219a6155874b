"""Chat templates of current families: the tokens that count are those of TRL's templates for training."""

import re
from pathlib import Path

import pytest

from fedfm.models import templates, truncation
from fedfm.models.chat_form import form_of, special_ids

trl = pytest.importorskip("trl.chat_template_utils")
FOLDER = Path(trl.__file__).parent / "chat_templates"
NAMES = sorted(path.stem.removesuffix("_training") for path in FOLDER.glob("*_training.jinja"))
TALK = (("user", "what is up"), ("assistant", "the sky"), ("user", "and down"))


def tokenizer_of(template):
    """Letters as tokens, and each text in pointed brackets of the template as a special one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(False, use_regex=False), decoders.ByteLevel()
    special = set(
        re.findall(
            r"<[|\uff5c][^<>\s{}']*[|\uff5c]>|<(?:start|end)_of_(?:turn|utterance)>|<[|]?turn[|]?>|</s>", template
        )
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<bos>", eos_token="<eos>", additional_special_tokens=sorted(special)
    )
    fast.chat_template = template
    return fast


@pytest.mark.parametrize("name", NAMES)
def test_what_counts_is_what_trl_counts(name):
    ours = tokenizer_of((FOLDER / f"{name}.jinja").read_text(encoding="utf-8"))
    theirs = tokenizer_of(trl.get_training_chat_template(ours))
    templates.fit(ours, None, {})
    for said in (TALK[:1], TALK):
        reference = templates.written(said, "the ground", None, theirs)
        row = templates.written(said, "the ground", None, ours)
        assert ours.decode(row.ids) == theirs.decode(reference.ids)
        counts = list(zip(row.ids, row.counts, reference.counts, strict=True))
        assert not [i for i, mine, marked in counts if mine > marked and ours.decode([i]).strip()]
        # Some of TRL's marks begin with what the prompt ends with, which nobody generates.
        before = [text for role, text in said if role == "assistant"]
        more = ours.decode([i for i, mine, marked in counts if marked > mine])
        header = more[: len(more) // (1 + len(before))]
        assert ours.decode(templates.asked(said, None, ours)).endswith(header)
        assert more == header * (1 + len(before))
        answers = ours.decode([i for i, mine in zip(row.ids, row.counts, strict=True) if mine])
        assert all(text in answers for text in (*before, "the ground"))


@pytest.mark.parametrize("name", NAMES)
def test_the_prompt_is_what_stands_before_the_answer(name):
    tokenizer = tokenizer_of((FOLDER / f"{name}.jinja").read_text(encoding="utf-8"))
    templates.fit(tokenizer, None, {})
    row = templates.written("what is up", "the ground", None, tokenizer)
    assert row.ids[: row.start] == templates.asked("what is up", None, tokenizer)
    # An export asks alike, through transformers alone.
    said = [{"role": "user", "content": "what is up"}]
    if not form_of(tokenizer).parts and "strftime" not in tokenizer.chat_template:
        asked = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert asked == row.ids[: row.start]
    generated = tokenizer.decode(row.ids[row.start :], skip_special_tokens=True)
    assert templates.answer_of(generated, None, tokenizer).strip() == "the ground"
    assert truncation.end_token(None, tokenizer) in special_ids(tokenizer)
