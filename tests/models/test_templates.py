"""How instructions are written: in training, for answers, and in exports."""

import numpy as np
import pytest
import torch
from tiny_models import load, sentences

from fedfm.api.model_card import how_to_load
from fedfm.core.rows import INPUT
from fedfm.data.table import Table
from fedfm.errors import InputError
from fedfm.models.export import export
from fedfm.models.language import chat_templates
from fedfm.models.language.chat_form import with_settings
from fedfm.models.language.chat_templates import encode_row
from fedfm.models.language.encoding import next_tokens
from fedfm.models.preprocessing import IGNORE

PAIRS = [("the quick brown fox", "jumps over"), ("a lazy dog", "birds sing")]
CHAT = "{{ bos_token }}{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {{ eos_token }}{% endfor %}"
ASSISTANT = "{% if add_generation_prompt %}assistant : {% endif %}"


def table():
    return Table("instruction", list(PAIRS), None, (), np.full(2, "train"))


TALK = (("system", "the"), ("user", "quick fox"), ("assistant", "jumps over"), ("user", "a dog"))
MARKED = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }} : {% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }} {{ eos_token }}{% endgeneration %}{% else %}{{ m['content'] }} {{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}assistant : {% endif %}"
)


def talks(*pairs):
    return Table("instruction", list(pairs), None, (), np.full(len(pairs), "train"))


def counted(model, rows):
    """The tokens of each row that the loss counts, as text."""
    found = []
    for i in range(len(rows)):
        batch = rows.batch([i])
        targets = next_tokens(batch)[0]
        assert (targets[targets != IGNORE] == batch["input_ids"][0, 1:][targets != IGNORE]).all()
        found.append(model.tools.tokenizer.decode(targets[targets != IGNORE]))
    return found


def parts(model):
    rows = model.prepare(table(), range(2))
    cut = list(zip(rows.tokens, rows.tensors["answer_start"].tolist(), strict=True))
    decode = model.tools.tokenizer.decode
    return [(decode(t[:s]), decode(t[s:])) for t, s in cut]


def with_chat(folder, tmp_path, template):
    import shutil

    from transformers import AutoTokenizer

    shutil.copytree(folder("llama"), tmp_path / "chat")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "chat")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path / "chat")
    return tmp_path / "chat"


def test_without_a_chat_template_a_line_is_the_question(folder):
    model = load(folder("llama"), table(), "lora")
    assert parts(model)[0] == ("<s> the quick brown fox", "jumps over [SEP]")
    assert model.tools.template == "{instruction}\n"


def test_an_own_text_and_a_name(folder):
    own = load(folder("llama"), table(), "lora", template="fox {instruction} dog ")
    assert parts(own)[1] == ("<s> fox a lazy dog dog", "birds sing [SEP]")
    alpaca = load(folder("llama"), table(), "lora", template="alpaca")
    assert "### Instruction:\n{instruction}\n\n### Response:\n" in alpaca.tools.template


def test_the_tokenizers_chat_template_and_the_assistants_part(folder, tmp_path):
    model = load(with_chat(folder, tmp_path, CHAT + ASSISTANT), table(), "lora")
    assert model.tools.template is None
    tokens, start = model.prepare(table(), [0]).tokens[0], int(model.prepare(table(), [0]).tensors["answer_start"])
    tokenizer = model.tools.tokenizer
    messages = [{"role": "user", "content": PAIRS[0][0]}, {"role": "assistant", "content": PAIRS[0][1]}]
    whole = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    assert tokens.tolist() == whole
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert whole[:start] == prompt
    plain = load(tmp_path / "chat", table(), "lora", template="plain")
    assert parts(plain)[0] == ("<s> the quick brown fox", "jumps over [SEP]")


def test_a_chat_template_that_hides_where_the_answer_begins_is_refused(folder, tmp_path):
    path = with_chat(folder, tmp_path, "{% if messages | length > 1 %}fox {% endif %}" + CHAT + ASSISTANT)
    with pytest.raises(InputError, match="writes a question differently once it is answered"):
        load(path, table(), "lora").prepare(table(), [0])


@pytest.mark.parametrize("paired", [False, True])
def test_alpacas_form_says_whether_an_input_follows(folder, paired):
    tokenizer = load(folder("llama"), table(), "lora", template="alpaca").tools.tokenizer
    said = "add" + (INPUT + "1 2" if paired else "")
    text = tokenizer.apply_chat_template([{"role": "user", "content": said}], tokenize=False)
    assert ("paired with an input" in text) is paired
    assert text.endswith(f"### Instruction:\n{said}\n\n### Response:\n")
    ids = chat_templates.prompt_tokens(said, chat_templates.TEXTS["alpaca"], tokenizer)
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("template", [None, "alpaca", "fox {instruction} dog "])
def test_an_export_asks_as_it_was_trained(folder, tmp_path, template):
    from transformers import AutoTokenizer

    model = load(folder("llama"), table(), "lora", template=template)
    export(model, model.params(), "hf", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    rows = model.prepare(table(), [0])
    said = [{"role": "user", "content": PAIRS[0][0]}, {"role": "assistant", "content": PAIRS[0][1]}]
    assert tokenizer.apply_chat_template(said, return_dict=True)["input_ids"] == rows.tokens[0].tolist()
    asked = tokenizer.apply_chat_template(said[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert asked == rows.tokens[0][: int(rows.tensors["answer_start"])].tolist()


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("alpacca", 'did you mean "alpaca"|did you mean alpaca|expected plain, alpaca, chat'),
        ("no place", r"a text with one \{instruction\}"),
        ("{instruction} {instruction}", r"a text with one \{instruction\}"),
        ("chat", "has no chat template"),
    ],
)
def test_wrong_templates_are_refused(folder, template, says):
    with pytest.raises(InputError, match=rf"model\.template.*({says})"):
        load(folder("llama"), table(), "lora", template=template)


def test_a_template_belongs_to_instructions(folder):
    with pytest.raises(InputError, match=r'model\.template belongs to task "instruction" or "preference"'):
        load(folder("bert"), sentences(), "lora", template="alpaca")


@pytest.mark.parametrize("template", [CHAT + ASSISTANT, MARKED], ids=["prefixes", "marks"])
def test_only_the_assistants_turns_count(folder, tmp_path, template):
    table = talks((TALK, "birds sing"), ("a fox", "sing"))
    model = load(with_chat(folder, tmp_path, template), table, "lora", max_length=60)
    rows = model.prepare(table, range(2))
    ended = " [SEP]"
    found = counted(model, rows)
    if template == MARKED:  # as transformers itself marks them
        messages = [{"role": role, "content": text} for role, text in (*TALK, ("assistant", "birds sing"))]
        said = model.tools.tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        assert rows.tokens[0].tolist() == said["input_ids"]
        kept = [token for token, counts in zip(said["input_ids"], said["assistant_masks"], strict=True) if counts]
        assert found[0] == model.tools.tokenizer.decode(kept)
    assert found == [f"jumps over{ended} birds sing{ended}", f"sing{ended}"]
    tokens, start = rows.tokens[0], int(rows.tensors["answer_start"][0])
    assert model.tools.tokenizer.decode(tokens[start:]) == f"birds sing{ended}"
    asked = model.tools.tokenizer.apply_chat_template(
        [{"role": role, "content": text} for role, text in TALK], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert tokens[:start].tolist() == asked  # what the evaluation answers


def test_the_loss_of_a_conversation_is_a_mean_over_the_assistants_tokens(folder, tmp_path):
    table = talks((TALK, "birds sing"), ("a fox", "sing"), (TALK[1:2], "a"))
    model = load(with_chat(folder, tmp_path, CHAT + ASSISTANT), table, "lora", max_length=60)
    rows, tokenizer = model.prepare(table, range(3)), model.tools.tokenizer
    total, tokens = 0.0, 0
    for said, output in table.inputs:
        turns = (*((("user", said),) if isinstance(said, str) else said), ("assistant", output))
        for i, (role, _) in enumerate(turns):
            if role != "assistant":
                continue
            before, upto = (
                tokenizer.apply_chat_template(
                    [{"role": r, "content": c} for r, c in some], add_generation_prompt=add, return_dict=True
                )["input_ids"]
                for some, add in ((turns[:i], True), (turns[: i + 1], False))
            )
            with torch.no_grad():
                z = torch.log_softmax(model.module(input_ids=torch.tensor([upto])).logits[0].double(), -1)
            for place in range(len(before), len(upto)):
                total -= z[place - 1, upto[place]].item()
                tokens += 1
    assert tokens == model.count_targets(rows.batch(range(3)))
    assert model.loss(rows.batch(range(3))).item() == pytest.approx(total / tokens, rel=1e-5)


@pytest.mark.parametrize("template", [None, "fox {instruction} dog ", CHAT + ASSISTANT])
def test_an_export_writes_conversations_as_they_were_trained(folder, tmp_path, template):
    from transformers import AutoTokenizer

    own = template is not None and "{%" in template
    path = with_chat(folder, tmp_path, template) if own else folder("llama")
    table = talks((TALK, "birds sing"))
    model = load(path, table, "lora", template=None if own else template, max_length=120)
    export(model, model.params(), "hf", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    said = [{"role": role, "content": text} for role, text in (*TALK, ("assistant", "birds sing"))]
    rows = model.prepare(table, [0])
    assert tokenizer.apply_chat_template(said, return_dict=True)["input_ids"] == rows.tokens[0].tolist()
    assert counted(model, rows) == ["jumps over [SEP] birds sing [SEP]"]
    asked = tokenizer.apply_chat_template(said[:-1], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert asked == rows.tokens[0][: int(rows.tensors["answer_start"])].tolist()


def test_earlier_answers_are_trained_in_the_form_of_the_last(folder, tmp_path):
    last = "{% if loop.last and m['role'] == 'assistant' %}lazy {% endif %}{{ m['content'] }} {{ eos_token }}"
    plain = CHAT.replace("{{ m['content'] }} {{ eos_token }}", last) + ASSISTANT
    table = talks((TALK, "birds sing"))
    model = load(with_chat(folder, tmp_path, plain), table, "lora", max_length=60)
    assert counted(model, model.prepare(table, [0])) == ["lazy jumps over [SEP] lazy birds sing [SEP]"]
    model.tools.tokenizer.chat_template = MARKED.replace("{{ m['content'] }} {{ eos_token }}", last)
    assert counted(model, model.prepare(table, [0])) == ["jumps over [SEP] lazy birds sing [SEP]"]


def test_a_templates_own_refusal_is_quoted(folder, tmp_path):
    strict = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + CHAT
    table = talks((TALK, "birds sing"))
    model = load(with_chat(folder, tmp_path, strict + ASSISTANT), table, "lora")
    with pytest.raises(InputError, match=r"the chat template refuses a conversation of system, .*: no system here"):
        model.prepare(table, [0])
    model.tools.tokenizer.chat_template = MARKED.replace("assistant' %}", "nobody' %}")
    with pytest.raises(InputError, match="leaves no token to the assistant"):
        model.prepare(table, [0])


def test_a_tokenizer_without_offsets_counts_the_same_letters():
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer()
    assert not tokenizer.is_fast
    tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}|{% endfor %}" + (
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    row = encode_row((("user", "a b"), ("assistant", "cd"), ("user", "e")), "fg", None, tokenizer)
    assert tokenizer.decode(row.ids) == "<user>a b|<assistant>cd|<user>e|<assistant>fg|</s>"
    assert tokenizer.decode([i for i, counts in zip(row.ids, row.counts, strict=True) if counts]) == "cd|fg|</s>"
    assert tokenizer.decode(row.ids[row.start :]) == "fg|</s>"


def test_a_letter_that_joins_question_and_answer_counts():
    """GPT-2's tokenizer and many others write two line breaks as one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: i for i, letter in enumerate(letters)}
    line = "\u010a"  # how byte-level tokenizers write a line break
    words[line * 2] = len(words)
    made = Tokenizer(models.BPE(words, [(line, line)]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(False, use_regex=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + '\n' }}{% endfor %}"
    row = encode_row((("user", "q"),), "\na", None, tokenizer)
    assert [tokenizer.decode([i]) for i in row.ids] == ["q", "\n\n", "a", "\n"]
    assert row.counts == [False, True, True, True]


@pytest.mark.parametrize("template", [CHAT, MARKED], ids=["prefixes", "marks"])
def test_a_row_is_the_same_on_every_day(folder, tmp_path, template):
    today = "{{ strftime_now('%Y') + ' ' + strftime_now(format='%d %b') }} "
    model = load(with_chat(folder, tmp_path, today + template), talks((TALK, "birds sing")), "lora", max_length=60)
    tokenizer = model.tools.tokenizer
    tokenizer.add_tokens(["2024", "26", "Jul"])
    row = encode_row(TALK, "birds sing", None, tokenizer)
    assert tokenizer.decode(row.ids).replace(" ", "").startswith("202426Jul<s>")
    assert tokenizer.decode([i for i, c in zip(row.ids, row.counts, strict=True) if c][-3:]) == "birds sing [SEP]"


@pytest.mark.parametrize("today", ["", "{{ strftime_now('%d %b') }} "])
def test_the_card_of_an_export_says_that_its_template_writes_another_date(folder, tmp_path, today):
    model = load(with_chat(folder, tmp_path, today + CHAT), talks((TALK, "birds sing")), "lora", max_length=60)
    export(model, model.params(), "peft", tmp_path / "out")
    written = (tmp_path / "out" / "chat_template.jinja").read_text()
    card = "\n".join(how_to_load(model, "peft", tmp_path / "out"))
    assert ("strftime_now" in written) == ("In training it wrote 26 July 2024" in card) == bool(today)


def test_a_template_with_a_date_that_cannot_be_fixed_is_refused(folder, tmp_path):
    table, today = talks((TALK, "birds sing")), "{% set form = '%d %b' %}{{ strftime_now(form) }} "
    with pytest.raises(InputError, match=r"writes today's date by 'strftime_now\(form\)"):
        load(with_chat(folder, tmp_path, today + CHAT), table, "lora", max_length=60).prepare(table, [0])


def test_a_template_whose_rest_depends_on_an_answer_is_refused(folder, tmp_path):
    echo = "{% if messages | length > 4 and loop.last %}{{ messages[2]['content'] }} {% endif %}"
    echo += "{% if loop.last and m['role'] == 'assistant' %}lazy {% endif %}"
    table = talks((TALK, "birds sing"))
    path = with_chat(folder, tmp_path, CHAT.replace("{{ m['content']", echo + "{{ m['content']") + ASSISTANT)
    with pytest.raises(InputError, match=r"also changes the text after it.*generation"):
        load(path, table, "lora", max_length=60).prepare(table, [0])


def test_variables_of_the_template_hold_in_training_in_answers_and_in_an_export(folder, tmp_path):
    from transformers import AutoTokenizer

    template = CHAT + "{% if add_generation_prompt %}assistant : {% if quick %}{{ quick }} {% endif %}{% endif %}"
    template = template.replace(
        "{{ m['content'] }}", "{% if quick and m['role'] == 'assistant' %}{{ quick }} {% endif %}{{ m['content'] }}"
    )
    path = with_chat(folder, tmp_path, template)
    model = load(path, table(), "lora", chat_template_kwargs={"quick": "lazy dog"})
    assert parts(model)[0] == ("<s> [UNK] [UNK] the quick brown fox [SEP] [UNK] [UNK] lazy dog", "jumps over [SEP]")
    export(model, model.params(), "hf", tmp_path / "out")
    tokenizer, said = AutoTokenizer.from_pretrained(tmp_path / "out"), [{"role": "user", "content": PAIRS[0][0]}]
    asked = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert asked == model.prepare(table(), [0]).tokens[0][: len(asked)].tolist()
    given = AutoTokenizer.from_pretrained(path).apply_chat_template(
        said, add_generation_prompt=True, return_dict=True, quick="lazy dog"
    )["input_ids"]
    assert asked == given
    with pytest.raises(InputError, match=r"chat_template_kwargs\.messages: expected the name of a variable"):
        load(path, table(), "lora", chat_template_kwargs={"messages": 1})
    with pytest.raises(InputError, match="chat_template_kwargs: the template is a text"):
        load(path, table(), "lora", template="plain", chat_template_kwargs={"quick": True})


@pytest.mark.parametrize(
    "value", [True, None, 3, 0.5, "a\"b'\\n{{ x }} \u00e9\U0001f600", ["a", {"b": False}]], ids=repr
)
def test_a_template_variable_has_the_users_value(value):
    from jinja2 import Environment

    made = Environment(autoescape=False).from_string(with_settings("{{ f(x) }}", {"x": value}))
    found = []
    made.render(f=found.append)
    assert found == [value]


def test_a_prefix_of_space_is_written_once():
    """Question and answer are one text to tokenizers that set a space before every text, as Llama 2's does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE({c: i for i, c in enumerate("\u2581abq\n")}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(prepend_scheme="always"), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", bos_token="<s>")
    row = encode_row("q", "ab", "{instruction}\n", tokenizer)
    assert row.ids == [*tokenizer("q\nab")["input_ids"], tokenizer.eos_token_id]
    assert tokenizer.convert_ids_to_tokens([i for i, c in zip(row.ids, row.counts, strict=True) if c]) == [
        "a",
        "b",
        "</s>",
    ]


def test_an_end_that_the_tokenizer_sets_behind_every_text_stands_once():
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer()
    assert tokenizer("q")["input_ids"][-1] == tokenizer.eos_token_id
    row = encode_row("q", "ab", "{instruction}: ", tokenizer)
    assert tokenizer.decode(row.ids) == "q: ab</s>"
    assert tokenizer.decode(row.ids[row.start :]) == "ab</s>"
