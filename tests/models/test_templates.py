"""How instructions are written: for the model in training, for its answers, and in what is exported."""

import numpy as np
import pytest
from tiny_models import load, sentences

from fedfm.data.table import Table
from fedfm.errors import InputError
from fedfm.models.export import export

PAIRS = [("the quick brown fox", "jumps over"), ("a lazy dog", "birds sing")]
CHAT = "{{ bos_token }}{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {{ eos_token }}{% endfor %}"
ASSISTANT = "{% if add_generation_prompt %}assistant : {% endif %}"


def table():
    return Table("instruction", list(PAIRS), None, (), np.full(2, "train"))


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
    own = load(folder("llama"), table(), "lora", template="fox {instruction} dog")
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
    with pytest.raises(InputError, match="writes a question otherwise once it is answered"):
        load(path, table(), "lora").prepare(table(), [0])


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
    with pytest.raises(InputError, match=r"model\.template: it writes instructions"):
        load(folder("bert"), sentences(), "lora", template="alpaca")
