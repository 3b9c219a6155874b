"""Read instructions, conversations and pairs of answers from the columns of a file."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedfm.core.row_kinds import Reading
from fedfm.data.sources import _conversations, _judged, _system, _tools
from fedfm.data.sources._other_tasks import refuse_other
from fedfm.data.sources._sheet import Sheet
from fedfm.data.spec import DataSpec


def instructions(sheet: Sheet, spec: DataSpec, source: str, labelled: bool) -> Reading:
    """Instructions with their answers, from columns of their own or from conversations.

    Raises:
        InputError: a column is missing, or a cell is empty or malformed; the message says where.
    """
    columns, at = sheet.columns, sheet.at
    asked, messages = spec.column("instruction"), spec.column("messages")
    doubts: tuple[str, ...] = ()
    if messages in columns and asked not in columns:
        inputs = _conversations.conversations(columns[messages], messages, at, answered=labelled)
        used = {messages}
    else:
        refuse_other(columns, spec.label, source, asked, labelled)
        inputs = _conversations.pairs(columns, spec, source, at, answered=labelled)
        used = {asked, spec.column("input"), spec.column("output")}
        doubts = _conversations.doubts_of_inputs(columns, spec, source)
    found = with_system_and_tools("instruction", inputs, used, sheet, spec, source)
    chosen = {spec.split, spec.partition.column or "", *(spec.where or ())}
    judged = _judged.of_answers(columns, {*found.used, *chosen}, source) if labelled else ()
    return replace(found, notices=(*doubts, *found.notices, *judged))


def preferences(sheet: Sheet, spec: DataSpec, source: str, labelled: bool) -> Reading:
    """Pairs of answers. If the rows are to be predicted, only their prompts are read, as instructions.

    Raises:
        InputError: for the reasons of :func:`instructions`.
    """
    columns, at, notices = sheet.columns, sheet.at, tuple[str, ...]()
    inputs: Any
    if labelled:
        inputs, notices = _conversations.preferences(columns, spec, source, at)
        notices = (*notices, *_judged.of_pairs(columns, source))
    else:
        inputs = _conversations.prompts(columns, spec, source, at)
    used = {spec.column(key) for key in ("prompt", "input", "chosen", "rejected")}
    kind = "preference" if labelled else "instruction"
    found = with_system_and_tools(kind, inputs, used, sheet, spec, source)
    return replace(found, notices=(*notices, *found.notices))


def with_system_and_tools(kind: str, inputs: Any, used: set[str], sheet: Sheet, spec: DataSpec, source: str) -> Reading:
    """The rows with their system messages, and with the tools that their answers may call."""
    notices: tuple[str, ...] = ()
    if (name := _system.system_column(sheet.columns, spec)) is not None:
        inputs, used = _system.with_system(inputs, sheet.columns[name], name, sheet.at), used | {name}
        notices = (_system.notice(sheet.columns[name], name, source),)
    if (name := spec.column("tools")) in sheet.columns:
        inputs, used = _tools.with_tools(inputs, sheet.columns[name], name, sheet.at), used | {name}
    return Reading(kind, inputs, frozenset(used), notices)
