"""The base class of tasks whose rows are prompts with answers. A template turns each row into text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fedfm.core.fields import setting
from fedfm.tasks._language import NO_CLASSES, LanguageTask
from fedfm.tasks.task import Column, Trained

if TYPE_CHECKING:
    from fedfm.core.rows import Rows
    from fedfm.data.table import Table
    from fedfm.models.network import Network
    from fedfm.models.preprocessors import Tools
    from fedfm.models.text_metrics import Answer

INSTRUCTIONS = (  # columns of instructions; rows of preferences may have them instead of prompts
    Column("instruction", 'instruction column of task "instruction"'),
    Column("input", 'column of inputs of task "instruction": each is written below its instruction'),
)
ADDITIONS = (  # columns that a prompt may have in addition
    Column("system", "column of system messages: text before an instruction, a conversation or a prompt"),
    Column("tools", "column of the tools that a row's answers may call: a list of JSON schemas, or its JSON text"),
)
MESSAGES = Column(
    "messages", 'conversations of task "instruction": lists of { role, content }, instead of instruction and output'
)


@dataclass(frozen=True)
class AnswerTask(LanguageTask):
    """A causal language model that answers prompts."""

    template: str | None = setting(
        None,
        "instruction, preference, visual_instruction: plain, alpaca, chat (the tokenizer's own), or a text with "
        "{instruction} before the answer [chat; plain if the tokenizer has no chat template]",
    )
    chat_template_kwargs: dict[str, Any] | None = setting(
        None,
        "instruction, preference, visual_instruction: variables of the tokenizer's chat template, e.g. "
        "{ enable_thinking = false }; training, predictions and exports use them",
    )
    answer_tokens: int | None = setting(
        None,
        "language models, sequence_to_sequence: largest number of tokens of an answer [max_length, at most "
        "half of a causal model's positions]; with 0, none are generated for test rows, which give only the loss",
        ge=0,
    )

    def fit_tokenizer(self, tokenizer: Any) -> tuple[str | None, tuple[str, ...]]:
        from fedfm.errors import InputError
        from fedfm.models.language import chat_templates

        template = chat_templates.text_of(self.template, tokenizer)
        if template is not None and self.chat_template_kwargs:
            raise InputError(
                "model.chat_template_kwargs: the template is a text without variables; drop one of the two",
                key="model.chat_template_kwargs",
            )
        return template, chat_templates.fit(tokenizer, template, self.chat_template_kwargs or {})

    def check_tools(self, tools: Tools, name: str) -> None:
        from fedfm.errors import InputError

        positions = tools.positions
        if positions and self.answer_tokens is not None and self.answer_tokens >= positions:
            raise InputError(
                f"model.answer_tokens = {self.answer_tokens}: {name!r} has {positions} positions for a prompt and its "
                f"answer; expected at most {positions - 1}"
            )

    def answer_limit(self, tools: Tools) -> int:
        return self.answer_tokens or super().answer_limit(tools)

    def generation_settings(self, model: Network) -> dict[str, Any]:
        """End and padding tokens, the limit of an answer's length, and that answers are greedy.

        A chat template can end an answer with a token that the base model does not list.
        """
        from fedfm.models.language.generation import stated_as_greedy
        from fedfm.models.text_metrics import answer_limit, end_tokens

        ends, pad = sorted(end_tokens(model, called=True)), model.tools.tokenizer.pad_token_id
        limit = {"max_length": None, "max_new_tokens": answer_limit(model)}
        return {"eos_token_id": ends or None, "pad_token_id": pad} | limit | stated_as_greedy(model)

    def generate(self, model: Network, rows: Rows) -> list[Answer]:
        """The model's greedy answers to the prompts of these rows."""
        from fedfm.models.text_metrics import answers

        return answers(model, rows)

    def _cut_prompts(self, asked: Table, model: Network) -> list[str]:
        """A notice about prompts that are cut; a prompt with images never is."""
        from fedfm.models.language.encoding import cut_rows

        tools, n = model.tools, len(asked)
        if self.images_in_texts or not (
            cut := cut_rows(asked, range(n), tools.tokenizer, tools.max_length, tools.template)
        ):
            return []
        return [
            f"{cut} of {n} prompts have more than {tools.max_length} tokens (model.max_length) and lose their beginning"
        ]

    def answer(self, trained: Trained, table: Table) -> dict[str, Any]:
        """The model's answer to each prompt, and scores that compare it with the row's answer if the row has one."""
        from fedfm.core.rows import blank
        from fedfm.models import lost_words
        from fedfm.models.text_metrics import answer_limit, compare_texts, likelihood, of_answers, references

        model = trained.model
        tokenizer = model.tools.tokenizer
        asked = replace(table, inputs=[(row[0], "", *row[2:]) for row in table.inputs])
        with trained.apply(model.prepare(asked, range(len(table)))) as rows:
            of_group = getattr(model, "generate", None)  # a model that several processes compute
            given = self.generate(model, rows) if of_group is None else of_group(rows)
        scored = [i for i, row in enumerate(table.inputs) if not blank(row[1])]
        rows = model.prepare(table, scored)
        found = of_answers(compare_texts([given[i] for i in scored], references(model, rows)))
        with trained.apply(rows) as adapted:
            found |= {key: value for key, value in likelihood(model, adapted).items() if key in ("loss", "perplexity")}
        return {
            **NO_CLASSES,
            "warnings": [*self._cut_prompts(asked, model), *lost_words.changed_outputs({"given": table}, tokenizer)],
            "answers": [a.text for a in given],
            "cut": [i for i, a in enumerate(given) if a.cut],
            "answer_tokens": answer_limit(model),
            **{key: found[key] for key in ("exact_match", "rouge_1", "loss", "perplexity")},
        }
