"""Tools and their calls in rows, training, answers and exports, as transformers has them."""

from __future__ import annotations

import io
import json

import pytest
import torch
from chats import WEATHER, counted, row_of, talk, tokenizer_of
from tiny_models import load

from fedfm.data.load import load_table
from fedfm.data.rows_to_predict import read_inputs
from fedfm.data.spec import DataSpec
from fedfm.data.table import contents, fingerprint
from fedfm.errors import InputError
from fedfm.models.export import export
from fedfm.models.language import chat_templates
from fedfm.models.metrics import evaluate
from fedfm.models.text_metrics import answers, references

# As Qwen3's: text and objects as arguments, an empty thought before the last answers alone.
QWEN = (
    "{% if tools %}<|im_start|>system\n<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n</tools><|im_end|>\n"
    "{% endif %}{% for m in messages %}{% if m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}"
    "<|im_start|>user{% endif %}\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{% if not loop.first or m.content %}\n{% endif %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {% if c.function.arguments is string %}'
    "{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Llama 3.1's: tools in the first question, objects as arguments, one call at a time.
LLAMA = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}<|start|>ipython<|end|>{{ m.content | tojson }}"
    "<|eot|>{% elif m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}"
    '{% endif %}<|start|>assistant<|end|>{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}<|eot|>{% else %}<|start|>{{ m.role }}<|end|>"
    "{% if tools and m.role == 'user' and loop.index0 < 2 %}{{ tools | tojson }}\n{% endif %}{{ m.content | trim }}"
    "<|eot|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|end|>{% endif %}"
)
# As DeepSeek V3's: text as arguments, and no tools.
DEEPSEEK = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}{% for c in m.tool_calls %}<|call|>"
    "{{ c.function.name + ' ' + c.function.arguments }}{% endfor %}{% else %}{{ m.content }}{% endif %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def read(path, rows, **keys):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_table(DataSpec(path=str(path), test_fraction=0, **keys), seed=0, task="instruction")


def model_of(template, path):
    """A tiny model of letters with this chat template."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tokenizer_of(template)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained(path)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=2048, **shape)).save_pretrained(
        path
    )
    return path


@pytest.mark.parametrize(
    "schemas", [[WEATHER], json.dumps([WEATHER]), [json.dumps(WEATHER)]], ids=["list", "text", "texts"]
)
@pytest.mark.parametrize("content", ["", None])
def test_calls_and_tools_are_read_with_all_fields_of_templates(tmp_path, schemas, content):
    table = read(tmp_path / "a.jsonl", [{"messages": talk(content=content), "tools": schemas}])
    (said, output), notices = table.inputs[0], table.notices
    assert (output, notices) == ("It rains in Bern.", ())
    assert [turn[0] for turn in said] == ["tools", "system", "user", "assistant", "tool"]
    assert json.loads(said[0][1]) == [WEATHER]
    tokenizer = tokenizer_of(QWEN)
    written = chat_templates.encode_row(said, output, None, tokenizer)
    plain = tokenizer.apply_chat_template(talk(content=content), tools=[WEATHER], tokenize=False)
    assert tokenizer.decode(written.ids).replace("<think>\n\n</think>\n\n", "", 1) == plain
    assert "it rains" in "".join(contents(table.inputs[0]))
    other = read(tmp_path / "b.jsonl", [{"messages": talk({"town": "Rome"}, content), "tools": schemas}])
    assert fingerprint(table) != fingerprint(other)


def test_objects_read_from_parquet_have_only_their_own_fields(tmp_path):
    import pyarrow
    import pyarrow.parquet

    talks, out = [talk(), talk({"day": 3})], io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"messages": talks, "tools": [[WEATHER], None]}), out)
    (tmp_path / "rows.parquet").write_bytes(out.getvalue())
    table = load_table(DataSpec(path=str(tmp_path / "rows.parquet"), test_fraction=0), seed=0, task="instruction")
    rows = [{"messages": talks[0], "tools": [WEATHER]}, {"messages": talks[1], "tools": None}]
    expected = read(tmp_path / "rows.jsonl", rows).inputs
    tokenizer = tokenizer_of(QWEN)
    for mine, plain in zip(table.inputs, expected, strict=True):
        assert chat_templates.encode_row(*mine, None, tokenizer) == chat_templates.encode_row(*plain, None, tokenizer)


def test_tools_of_instructions_and_preferences(tmp_path):
    table = read(tmp_path / "a.jsonl", [{"instruction": "Bern?", "output": "b", "tools": [WEATHER]}])
    assert table.inputs[0][0][1:] == (("user", "Bern?"),)
    both = {"prompt": talk()[:2], "chosen": talk()[2:3], "rejected": talk()[4:], "tools": [WEATHER]}
    (tmp_path / "b.jsonl").write_text(json.dumps(both) + "\n")
    spec = DataSpec(path=str(tmp_path / "b.jsonl"), test_fraction=0)
    ((said, good, bad),) = load_table(spec, seed=0, task="preference").inputs
    tokenizer = tokenizer_of(LLAMA)
    rows = [chat_templates.encode_row(said, answer, None, tokenizer) for answer in (good, bad)]
    assert [counted(row.ids, row.counts, tokenizer) for row in rows] == [
        ['{"name": "weather", "parameters": {"town": "Bern"}}<|eot|>'],
        ["It rains in Bern.<|eot|>"],
    ]


CALLS = {
    "qwen": (
        QWEN,
        "<think>\n\n</think>\n\n"
        '<tool_call>\n{"name": "weather", "arguments": {"town": "Bern"}}\n</tool_call><|im_end|>\n',
    ),
    "llama": (LLAMA, '{"name": "weather", "parameters": {"town": "Bern"}}<|eot|>'),
    "deepseek": (DEEPSEEK, '<|call|>weather {"town": "Bern"}<|end|>'),
}


@pytest.mark.parametrize("arguments", [{"town": "Bern"}, '{"town": "Bern"}'], ids=["object", "text"])
@pytest.mark.parametrize("name", CALLS)
def test_the_loss_counts_calls_and_answers_but_not_results_of_tools(name, arguments):
    """Arguments are written as the template takes them, whatever form the row has."""
    template, call = CALLS[name]
    tokenizer, tools = tokenizer_of(template), () if name == "deepseek" else (WEATHER,)
    said, output = row_of(talk(arguments), tools)
    row = chat_templates.encode_row(said, output, None, tokenizer)
    thought = "<think>\n\n</think>\n\n" if name == "qwen" else ""
    end = call[call.rindex("<|") :]
    assert counted(row.ids, row.counts, tokenizer) == [call, f"{thought}It rains in Bern.{end}"]
    given = talk('{"town": "Bern"}' if name == "deepseek" else {"town": "Bern"})
    whole = tokenizer.apply_chat_template(given, tools=list(tools) or None, tokenize=False)
    assert tokenizer.decode(row.ids).replace(thought, "", 1) == whole
    # The prompt of the call, and of the last answer.
    for upto in (2, 4):
        before, _ = row_of([*given[:upto], given[-1]], tools)
        asked = tokenizer.apply_chat_template(
            given[:upto], tools=list(tools) or None, add_generation_prompt=True, tokenize=False
        )
        assert tokenizer.decode(chat_templates.prompt_tokens(before, None, tokenizer)) == asked


@pytest.mark.parametrize(
    ("template", "rows", "says"),
    [
        (CHATML, (talk(), ()), "leaves out the call of 'weather'"),
        (CHATML, ([*talk()[:2], talk()[-1]], (WEATHER,)), "leaves out the tool 'weather'"),
        (DEEPSEEK, (talk(), (WEATHER,)), "leaves out the tool 'weather'"),
        (QWEN.replace("m.content }}\n</tool", "'' }}\n</tool"), (talk(), (WEATHER,)), "leaves out what a tool answers"),
    ],
)
def test_a_template_that_leaves_out_tools_is_refused(template, rows, says):
    tokenizer = tokenizer_of(template)
    said, output = row_of(*rows)
    for act in (
        lambda: chat_templates.encode_row(said, output, None, tokenizer),
        lambda: chat_templates.prompt_tokens(said, None, tokenizer),
    ):
        with pytest.raises(InputError, match=rf"model\.template: .*{says}.*; take a model with a template") as error:
            act()
        assert "\n" not in str(error.value)


def test_a_templates_own_refusal_of_calls_is_quoted():
    messages = talk()
    messages[2]["tool_calls"] *= 2
    with pytest.raises(InputError, match=r"refuses a conversation of system, user, assistant.*: one call at once"):
        chat_templates.encode_row(*row_of(messages), None, tokenizer_of(LLAMA))


def test_a_plain_text_template_refuses_tools(folder):
    model = load(folder("llama"), read_table(row_of([*talk()[:2], talk()[-1]])), "lora")
    with pytest.raises(InputError, match="leaves out the tool"):
        model.prepare(read_table(row_of([*talk()[:2], talk()[-1]])), [0])


def read_table(*rows):
    import numpy as np

    from fedfm.data.table import Table

    return Table("instruction", list(rows), None, (), np.full(len(rows), "train"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tool_calls": ["weather"]}, r"message 3 .* has \"tool_calls\" 'weather': calls are expected, each like"),
        ({"tool_calls": [{"function": {"arguments": {}}}]}, "calls are expected, each like"),
        (
            {"tool_calls": [{"function": {"name": "weather"}}]},
            "calls 'weather' with arguments None: expected an object",
        ),
        ({"tool_calls": [{"name": "weather", "arguments": "Bern"}]}, "calls 'weather' with arguments 'Bern'"),
        ({"role": "user"}, 'has "tool_calls", which is not read'),
        ({"weight": 1}, 'has "weight", which is not read'),
    ],
)
def test_an_invalid_call_is_refused_with_its_place(tmp_path, change, says):
    messages = talk()
    messages[2] |= change
    with pytest.raises(InputError, match=says):
        read(tmp_path / "a.jsonl", [{"messages": messages}])


@pytest.mark.parametrize("cell", ["hammer", ["hammer"], [{"type": "function"}], {"name": "weather"}])
def test_an_invalid_list_of_tools_is_refused_unless_another_column_is_named(tmp_path, cell):
    row = {"messages": [*talk()[:2], talk()[-1]], "tools": cell}
    with pytest.raises(InputError, match=r'line 1: column "tools" holds .*: a list of tools is expected.*data\.tools'):
        read(tmp_path / "a.jsonl", [row])
    assert read(tmp_path / "a.jsonl", [row], tools="functions").inputs[0][0][0] == ("system", "be kind")


@pytest.mark.parametrize("name", ["qwen", "llama"])
def test_a_prompt_contains_the_tools_and_a_generated_call_is_kept_as_text(tmp_path, monkeypatch, name):
    template, call = CALLS[name]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": talk()[:3], "tools": [WEATHER]}) + "\n")
    table = read_inputs(path, DataSpec(path="x"), kind="instruction")
    model = load(model_of(template, tmp_path / "tiny"), table, "lora", max_length=1000, answer_tokens=120)
    rows, tokenizer = model.prepare(table, [0]), model.tools.tokenizer
    prompt = tokenizer.apply_chat_template(talk()[:2], tools=[WEATHER], add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    assert len(answers(model, rows)) == 1  # it generates

    def generate(input_ids, **_):
        assert input_ids[0].tolist() == prompt
        said = tokenizer(call + "more", add_special_tokens=False)["input_ids"]
        return torch.cat([input_ids, torch.tensor([said])], 1)

    monkeypatch.setattr(model.module, "generate", generate)
    text = call.removeprefix("<think>\n\n</think>\n\n").replace("<|im_end|>\n", "").replace("<|eot|>", "")
    assert [(a.text, a.cut) for a in answers(model, rows)] == [(text, False)]
    assert [r.strip() for r in references(model, rows)] == [text]
    assert evaluate(model, rows)["exact_match"] == 1


def test_the_prefix_of_an_answer_is_not_counted_even_with_special_tokens():
    """As in gpt-oss, whose calls have other special tokens."""
    template = CHATML.replace("<|{{ m.role }}|>", "<|{{ m.role }}|>{% if m.role == 'assistant' %}<|final|>{% endif %}")
    tokenizer = tokenizer_of(template + "{% if tools %}{{ tools }}{% endif %}<|assistant|>")
    tokenizer.chat_template = template
    for special, generated in ((True, "<|final|>It rains."), (False, "It rains."), (True, "<|call|>It rains.")):
        expected = "<|call|>It rains." if "call" in generated else "It rains."
        assert chat_templates.answer_of(generated, None, tokenizer, special=special) == expected


def test_an_export_writes_tools_and_calls_as_they_were_trained(tmp_path):
    from transformers import AutoTokenizer

    table = read_table(row_of(talk()))
    model = load(model_of(LLAMA, tmp_path / "tiny"), table, "lora", max_length=1000)
    export(model, model.params(), "hf", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer.apply_chat_template(talk(), tools=[WEATHER], return_dict=True)["input_ids"]
    assert ids == model.prepare(table, [0]).tokens[0].tolist()


def test_a_separate_template_for_tools_is_used_for_rows_with_tools():
    """As Command R and Hermes have them."""
    tokenizer = tokenizer_of(CHATML + LLAMA)
    tokenizer.chat_template = {"default": CHATML + "\n", "tool_use": LLAMA + "\n"}
    for tools, messages in (([WEATHER], talk()), (None, [*talk()[:2], talk()[-1]])):
        row = chat_templates.encode_row(*row_of(messages, tools or ()), None, tokenizer)
        assert tokenizer.decode(row.ids) == tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
