"""Chat templates of current families: the tokens that count are those of TRL's templates for training."""

from pathlib import Path

import pytest
from chats import WEATHER, counted, row_of, talk, tokenizer_of

from fedfm.models.language import chat_templates, truncation
from fedfm.models.language.chat_form import form_of, special_ids, text_of

trl = pytest.importorskip("trl.chat_template_utils")
FOLDER = Path(trl.__file__).parent / "chat_templates"
NAMES = sorted(path.stem.removesuffix("_training") for path in FOLDER.glob("*_training.jinja"))
TALK = (("user", "what is up"), ("assistant", "the sky"), ("user", "and down"))


@pytest.mark.parametrize("name", NAMES)
def test_the_counted_tokens_are_those_of_trl(name):
    ours = tokenizer_of((FOLDER / f"{name}.jinja").read_text(encoding="utf-8"))
    theirs = tokenizer_of(trl.get_training_chat_template(ours))
    chat_templates.fit(ours, None, {})
    for said in (TALK[:1], TALK):
        reference = chat_templates.encode_row(said, "the ground", None, theirs)
        row = chat_templates.encode_row(said, "the ground", None, ours)
        assert ours.decode(row.ids) == theirs.decode(reference.ids)
        counts = list(zip(row.ids, row.counts, reference.counts, strict=True))
        assert not [i for i, mine, marked in counts if mine > marked and ours.decode([i]).strip()]
        # Some of TRL's marks begin with what the prompt ends with, which nobody generates.
        before = [text for role, text in said if role == "assistant"]
        more = ours.decode([i for i, mine, marked in counts if marked > mine])
        header = more[: len(more) // (1 + len(before))]
        assert ours.decode(chat_templates.prompt_tokens(said, None, ours)).endswith(header)
        assert more == header * (1 + len(before))
        answers = ours.decode([i for i, mine in zip(row.ids, row.counts, strict=True) if mine])
        assert all(text in answers for text in (*before, "the ground"))


@pytest.mark.parametrize("name", NAMES)
def test_the_prompt_is_what_stands_before_the_answer(name):
    tokenizer = tokenizer_of((FOLDER / f"{name}.jinja").read_text(encoding="utf-8"))
    chat_templates.fit(tokenizer, None, {})
    row = chat_templates.encode_row("what is up", "the ground", None, tokenizer)
    assert row.ids[: row.start] == chat_templates.prompt_tokens("what is up", None, tokenizer)
    # An export asks alike, through transformers alone.
    said = [{"role": "user", "content": "what is up"}]
    if not form_of(tokenizer).parts and "strftime" not in tokenizer.chat_template:
        asked = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert asked == row.ids[: row.start]
    generated = tokenizer.decode(row.ids[row.start :], skip_special_tokens=True)
    assert chat_templates.answer_of(generated, None, tokenizer).strip() == "the ground"
    assert truncation.end_token(None, tokenizer) in special_ids(tokenizer)


WITH_TOOLS = [name for name in NAMES if "tools" in (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")]
# lfm2 leaves out calls; diffusion_gemma asks after a tool's answer without the beginning of the turn that it writes.
WITH_CALLS = [name for name in WITH_TOOLS if name not in ("lfm2", "diffusion_gemma")]


@pytest.mark.parametrize("name", WITH_CALLS)
def test_calls_of_tools_count_as_trl_counts_them(name):
    ours = tokenizer_of((FOLDER / f"{name}.jinja").read_text(encoding="utf-8"))
    theirs = tokenizer_of(trl.get_training_chat_template(ours))
    chat_templates.fit(ours, None, {})
    for messages in (talk(), talk()[:3]):
        row = chat_templates.encode_row(*row_of(messages), None, ours)
        reference = theirs.apply_chat_template(
            messages,
            tools=[WEATHER],
            chat_template=text_of(theirs),
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        assert ours.decode(row.ids) == theirs.decode(reference["input_ids"])
        marked = counted(reference["input_ids"], reference["assistant_masks"], theirs)
        for mine, of_trl in zip(counted(row.ids, row.counts, ours), marked, strict=True):
            header = of_trl.removesuffix(mine)  # some of TRL's marks begin with what the prompt ends with
            assert of_trl == header + mine
            assert header == "" or header in ours.decode(chat_templates.prompt_tokens(row_of(messages)[0], None, ours))
