"""Folders of tiny models, made once a session."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_models


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = tiny_models.save(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get
