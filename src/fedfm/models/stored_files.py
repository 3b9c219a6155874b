"""Reads the tensors of a checkpoint from its files, without changes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

from torch import Tensor

from fedfm.models.refusals import refusal


class StoredWeights(Mapping[str, Tensor]):
    """The tensors in a checkpoint's safetensors files by name; each is read when it is accessed.

    Args:
        path: folder or hub id.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = path

    @cached_property
    def _files(self) -> dict[str, str]:
        """The file of each tensor, by the tensor's name.

        The names come from the files themselves, because an index may name tensors that no file has. If there are both
        a single complete file and an index, the single file is used, as in transformers.
        """
        from safetensors import safe_open
        from transformers.utils import cached_file

        def find(name: str) -> str | None:
            found = cached_file(str(self._path), name, _raise_exceptions_for_missing_entries=False)
            return None if found is None else str(found)

        files, index = ["model.safetensors"], None
        if find(files[0]) is None and (index := find("model.safetensors.index.json")):
            files = sorted(set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()))
        names: dict[str, str] = {}
        for name in files:
            if (path := find(name)) is None:
                if index:
                    raise FileNotFoundError(f"no file {name}, which its index names")
                continue
            with safe_open(path, "pt") as file:
                names |= dict.fromkeys(file.keys(), path)
        return names

    def __getitem__(self, name: str) -> Tensor:
        from safetensors import safe_open

        with safe_open(self._files[name], "pt") as file:
            return file.get_tensor(name)  # type: ignore[no-any-return]

    def part(self, name: str, rows: slice) -> Tensor:
        """Some rows of a tensor; the others are not read."""
        from safetensors import safe_open

        with safe_open(self._files[name], "pt") as file:
            return file.get_slice(name)[rows]  # type: ignore[no-any-return]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without its values."""
        from safetensors import safe_open

        with safe_open(self._files[name], "pt") as file:
            return tuple(file.get_slice(name).get_shape())

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def dtype(self, name: str) -> str:
        """The dtype of a tensor, without its values, as safetensors names it: ``F32``, ``BF16``, ``U8``."""
        from safetensors import safe_open

        with safe_open(self._files[name], "pt") as file:
            return str(file.get_slice(name).get_dtype())

    def heads(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """(shape, dtype) of each tensor, from the headers of the files; a dtype is e.g. ``F32``, ``BF16`` or ``U8``."""
        from safetensors import safe_open

        out = dict[str, tuple[tuple[int, ...], str]]()
        for path in sorted(set(self._files.values())):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is not a mapping
                    entry = file.get_slice(name)
                    out[name] = tuple(entry.get_shape()), str(entry.get_dtype())
        return out


def checkpoint_of(path: Path | str, name: str) -> StoredWeights:
    """The checkpoint's tensors by name.

    Raises:
        InputError: one of its files cannot be read.
    """
    from safetensors import SafetensorError

    found = StoredWeights(path)
    try:
        len(found)  # reads the names
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise refusal(path, name, error) from None
    return found
