"""Visual instruction: a model that reads texts and images learns the answers in conversations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from fedfm.tasks.instruction import Instruction
from fedfm.tasks.task import Column, Reading, RowKind

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy as np
    from torch import Tensor

    from fedfm.core.rows import Batch, Rows
    from fedfm.data.sources._sheet import Sheet
    from fedfm.data.spec import DataSpec
    from fedfm.data.table import Table
    from fedfm.models.network import Network
    from fedfm.models.preprocessors import Tools
    from fedfm.models.spec import ModelSpec
    from fedfm.models.text_metrics import Answer

_EXAMPLE = """With an image of Pillow as `picture`, this code asks a question about it:

```python
question = [{"type": "image", "image": picture}, {"type": "text", "text": "What is this?"}]
prompt = processor.apply_chat_template(
    [{"role": "user", "content": question}],
    add_generation_prompt=True,
    tokenize=True,
    return_dict=True,
    return_tensors="pt",
)
said = model.generate(**prompt, do_sample=False)
print(processor.decode(said[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
```"""


@dataclass(frozen=True)
class VisualInstruction(Instruction):
    """A row is (messages, answer, images); the loss is a mean over the answers' tokens."""

    name: ClassVar[str] = "visual_instruction"
    kinds: ClassVar[tuple[str, ...]] = ("visual_instruction",)
    own_kind: ClassVar[RowKind | None] = RowKind("visual_instruction", "conversations with images")
    implied_by: ClassVar[tuple[str, ...]] = ("visual_instruction",)
    columns: ClassVar[tuple[Column, ...]] = (
        Column("messages", "conversations: lists of { role, content }"),
        Column("images", 'images of a conversation, task "visual_instruction": a list of paths, or of contents'),
        Column("system", "column of system messages"),
        Column("tools", "column of the tools that a row's answers may call"),
    )
    images_in_texts: ClassVar[bool] = True
    no_pretraining: ClassVar[str] = "it trains models of texts or of images, and this task needs a model of both"

    @property
    def answers(self) -> bool:
        """Whether rows are prompts with answers: True."""
        return True

    def claims(self, columns: Mapping[str, Any], spec: DataSpec) -> bool:
        return spec.column("messages") in columns and spec.column("images") in columns

    def read(self, sheet: Sheet, spec: DataSpec, *, source: str, labelled: bool) -> Reading:
        from fedfm.tasks import _image_conversations

        return _image_conversations.conversations(sheet, spec, source, labelled)

    def shuffle_targets(self, rows: Table, rng: np.random.Generator) -> Table:
        """Permute the answers among the conversations."""
        order = rng.permutation(len(rows)).tolist()
        inputs = [(said, rows.inputs[j][1], images) for (said, _, images), j in zip(rows.inputs, order, strict=True)]
        return replace(rows, inputs=inputs)

    def rows(self, part: Table, tools: Tools, classes: tuple[str, ...]) -> Rows:
        from fedfm.core.rows import Rows
        from fedfm.core.tokens import Tokens
        from fedfm.models.language.encoding import answer_places
        from fedfm.tasks import _image_arguments, _image_tokens

        files = [images for *_, images in part.inputs]
        if any(files):
            _image_arguments.check(tools.processor, type(tools.processor).__name__)
        rows = list[_image_tokens.EncodedRow]()

        def images() -> Iterator[dict[str, Tensor]]:
            for row in part.inputs:  # one after the other, since all images together may not fit into memory
                found = _image_tokens.encode(row, tools)
                rows.append(replace(found, images={}))
                yield found.images

        deferred, shapes = _image_arguments.of_rows(tools.processor, files, images())
        names = sorted({name for row in rows for name in row.by_token})
        return Rows(
            answer_places(rows) | shapes,
            tokens=Tokens.of([row.ids for row in rows]),
            pad=int(tools.tokenizer.pad_token_id or 0),
            pairs=tuple(part.inputs),
            deferred=dict(deferred),
            token_arguments={n: Tokens.of([row.by_token.get(n, [0] * len(row.ids)) for row in rows]) for n in names},
        )

    def forewarnings(self, parts: Mapping[str, Table], tools: Tools) -> list[str]:
        from fedfm.models import left_out, lost_words
        from fedfm.tasks import _image_tokens

        cut, losses = [], dict[str, tuple[Counter[str], int]]()
        for words, part in parts.items():
            count = sum(_image_tokens.length(row, tools) > tools.max_length for row in part.inputs)
            cut += [f"{count} of {len(part)} {words} rows"] if count else []
            pairs = [row[:2] for row in part.inputs]
            losses[words] = left_out.count(pairs, None, tools.tokenizer), len(part)
        found = [*left_out.notices(losses), *lost_words.changed_outputs(parts, tools.tokenizer)]
        if cut:
            found.append(
                f"{' and '.join(cut)} have more than {tools.max_length} tokens (model.max_length) and are cut: answers "
                "lose their end, so the model does not learn where they end; prompts with their images stay"
            )
        return found

    def auto_class(self, kind: str) -> str:
        return "ImageTextToText"

    def peft_type(self, kind: str) -> str | None:
        return None  # transformers has no CausalLM for such a model, so PEFT has to load it by its class

    def pipeline(self, kind: str) -> str | None:
        return "image-text-to-text"

    def processor(self, path: Path | str, spec: ModelSpec, config: Any, tokenizer: Any) -> tuple[Any, tuple[str, ...]]:
        from fedfm.tasks import _image_processor

        return _image_processor.read(path, spec.name, config, tokenizer)

    def fit_tokenizer(self, tokenizer: Any) -> tuple[str | None, tuple[str, ...]]:
        from fedfm.errors import InputError
        from fedfm.models.language.chat_form import MARKS, template_of

        if self.template not in (None, "chat"):
            raise InputError(
                f"model.template = {self.template!r}: a text has no place for images; expected chat, the model's own",
                key="model.template",
            )
        if MARKS.search(template_of(tokenizer)):
            raise InputError(
                "model.name: the chat template marks answers by {% generation %}, which is not read for rows with "
                "images: remove the marks from chat_template.jinja; the answers are found without them",
                key="model.name",
            )
        return super().fit_tokenizer(tokenizer)

    def prompts(self, rows: Rows) -> Rows:
        if "answer_start" not in rows.tensors or rows.tokens is None:
            return rows
        ends = rows.tensors["answer_start"].numpy()
        return replace(
            rows,
            tensors={name: x for name, x in rows.tensors.items() if not name.startswith("answer_")},
            tokens=rows.tokens.cut(ends),
            token_arguments={name: of.cut(ends) for name, of in rows.token_arguments.items()},
        )

    def logits(self, model: Network, batch: Batch) -> Tensor:
        from inspect import signature

        from fedfm.models.families import unwrap
        from fedfm.tasks._image_arguments import for_model

        return model.outputs(for_model(batch, signature(unwrap(model.module).forward).parameters))

    def generate(self, model: Network, rows: Rows) -> list[Answer]:
        from fedfm.tasks._image_answers import answers

        return answers(model, rows)

    def about_export(self, to: str, folder: Path) -> str:
        from fedfm.tasks._image_processor import about_videos

        return "\n\n".join(text for text in (about_videos(folder), _EXAMPLE) if text)
