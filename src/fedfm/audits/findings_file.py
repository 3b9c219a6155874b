"""Read ``audit.json`` in a run directory: the findings of the run's audits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedfm.core.text import from_json

FILE = "audit.json"


def read(run_dir: Path) -> Mapping[str, Any] | None:
    """The content of the file; None if it does not exist, {} if ``fedfm audit`` did not write it."""
    try:
        content = from_json((run_dir / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def is_about(content: Mapping[str, Any], params_sha256: str | None) -> bool:
    """Whether the findings are about these parameters. They are not if the run was continued after its audit."""
    return bool(content.get("params_sha256", params_sha256) == params_sha256)


def findings(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The findings in the content."""
    listed = content.get("findings")
    return [f for f in listed if isinstance(f, dict) and f] if isinstance(listed, list) else []
