"""For chat templates: tokenizers of letters, which write any text, and a conversation with a tool."""

import re

from fedfm.data.sources._conversations import conversations
from fedfm.data.sources._tools import with_tools

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "the weather of a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}


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


def counted(ids, counts, tokenizer):
    """The runs of tokens that count, as texts."""
    edges = [i for i, (a, b) in enumerate(zip([0, *counts], [*counts, 0], strict=True)) if bool(a) != bool(b)]
    return [tokenizer.decode(ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def talk(arguments=None, content=""):
    """A question, a call, what the tool answers, and the answer."""
    arguments = {"town": "Bern"} if arguments is None else arguments
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "Bern or Rome?"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "name": "weather", "tool_call_id": "abcdefghi", "content": "it rains"},
        {"role": "assistant", "content": "It rains in Bern."},
    ]


def row_of(messages, tools=(WEATHER,)):
    """What was said and the answer, as they are read."""
    rows = conversations([messages], "messages", str, answered=True)
    return with_tools(rows, [list(tools)], "tools", str)[0]
