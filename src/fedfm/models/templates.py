"""How an instruction and its answer are written for a language model.

A template is a text with ``{instruction}``, after which the answer follows, or the tokenizer's own chat template. A
text is also written as a chat template, which an export carries: whoever loads it asks in the form that was trained.
"""

from __future__ import annotations

import json
from typing import Any

from fedfm.errors import InputError, close

TEXTS = {
    "plain": "{instruction}\n",
    "alpaca": (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\n{instruction}\n\n### Response:\n"
    ),
}
CHAT = "chat"
_PLACE = "{instruction}"


def text_of(template: str | None, tokenizer: Any) -> str | None:
    """The text with ``{instruction}``; None: the tokenizer's chat template.

    Args:
        template: a name, a text, or None for the tokenizer's chat template if it has one, else "plain".

    Raises:
        InputError: neither a name nor a text with ``{instruction}``, or "chat" without a chat template.

    Example:
        >>> text_of("Q: {instruction} A: ", None)
        'Q: {instruction} A: '
    """
    has = getattr(tokenizer, "chat_template", None)
    if template is None:
        return None if has else TEXTS["plain"]
    if template == CHAT:
        if not has:
            raise InputError('model.template = "chat": the tokenizer has no chat template; expected "alpaca" or a text')
        return None
    text = TEXTS.get(template, template)
    if text.count(_PLACE) != 1:
        near = close(template, [*TEXTS, CHAT])
        raise InputError(
            f"model.template = {template!r}: expected {', '.join([*TEXTS, CHAT])}, or a text with one {_PLACE}{near}"
        )
    return text


def as_chat_template(text: str, tokenizer: Any) -> str:
    """The same as a chat template (Jinja), with the tokens that the tokenizer adds by itself."""
    before, after = (json.dumps(part) for part in text.split(_PLACE))
    empty = tokenizer("")["input_ids"]
    first = "{{ bos_token }}" if empty and empty[0] == tokenizer.bos_token_id else ""
    asked = "{{ " + before + " + m['content'] + " + after + " }}"
    answered = "{{ m['content']" + (" + eos_token" if tokenizer.eos_token_id is not None else "") + " }}"
    turns = "{% for m in messages %}{% if m['role'] == 'assistant' %}" + answered + "{% else %}" + asked
    return first + turns + "{% endif %}{% endfor %}"


def asked(instruction: str, text: str | None, tokenizer: Any) -> list[int]:
    """Tokens of the prompt, after which the answer begins."""
    if text is not None:
        return list(tokenizer(text.replace(_PLACE, instruction))["input_ids"])
    return _chat(tokenizer, [{"role": "user", "content": instruction}], add_generation_prompt=True)


def answered(instruction: str, output: str, text: str | None, tokenizer: Any) -> list[int]:
    """Tokens of the answer, with the token that ends it.

    Raises:
        InputError: the chat template writes the question otherwise once it is answered.
    """
    if text is not None:
        eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        return list(tokenizer(output, add_special_tokens=False)["input_ids"]) + eos
    question = {"role": "user", "content": instruction}
    prompt = _chat(tokenizer, [question], add_generation_prompt=True)
    whole = _chat(tokenizer, [question, {"role": "assistant", "content": output}])
    if whole[: len(prompt)] != prompt:
        raise InputError(
            "model.template: this chat template writes a question otherwise once it is answered, so that no tokens are "
            'the answer\'s; set model.template = "alpaca" or a text with {instruction}'
        )
    return whole[len(prompt) :]


def _chat(tokenizer: Any, messages: list[dict[str, str]], **options: Any) -> list[int]:
    written = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    return list(tokenizer(written, add_special_tokens=False)["input_ids"])
