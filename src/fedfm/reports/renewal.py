"""Write the pages of a run again after its files have changed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedfm.reports import html
from fedfm.reports.read import DOSSIER

if TYPE_CHECKING:
    from fedfm.core.output_files import RowPictures


def renew(run_dir: Path, rows: RowPictures | None = None) -> Path:
    """Write the report again, with ``rows`` if given, and the dossier if the run has one; return the report's path."""
    if (Path(run_dir) / DOSSIER).is_file():
        from fedfm.reports import dossier

        dossier.write(run_dir)
    return html.write(run_dir, rows=rows)
