"""Tools and their calls: in rows, in what is trained, in answers and in exports, as TRL and transformers have them."""

from __future__ import annotations

import json

import pytest
from test_chat_templates_of_trl import FOLDER, tokenizer_of, trl

from fedfm.data.load import load_table, read_inputs
from fedfm.data.spec import DataSpec
from fedfm.errors import InputError
from fedfm.models import templates
from fedfm.models.chat_form import ASSISTANT

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "the weather of a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}


def call(arguments, name="weather"):
    return {"id": "abcdefghi", "type": "function", "function": {"name": name, "arguments": arguments}}


def talk(arguments):
    return [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "Bern or Rome?"},
        {"role": "assistant", "content": "", "tool_calls": [call(arguments)]},
        {"role": "tool", "name": "weather", "tool_call_id": "abcdefghi", "content": "it rains"},
        {"role": "assistant", "content": "It rains in Bern."},
    ]


def read(tmp_path, rows, **keys):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_table(DataSpec(path=str(path), test_fraction=0, **keys), seed=0, task="instruction")


def counted(row, tokenizer):
    """The runs of tokens that count, as texts."""
    edges = [i for i in range(len(row.ids) + 1) if (i and row.counts[i - 1]) != (i < len(row.ids) and row.counts[i])]
    return [tokenizer.decode(row.ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]
