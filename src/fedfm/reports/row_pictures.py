"""The report's section with pictures of a few test rows, for ``fedfm report --rows``."""

from __future__ import annotations

import base64

from fedfm.core.output_files import RowPictures
from fedfm.reports.page import note
from fedfm.reports.text import esc


def section(found: RowPictures) -> str:
    """The section: the colours of the classes, and the pictures with their captions."""
    keys = "".join(
        f'<span style="border-left:1em solid {colour};padding:0 1em 0 .4em">{esc(name)}</span>'
        for name, colour in found.colours.items()
        if colour
    )
    figures = "".join(
        f'<figure><img alt="{esc(caption)}" src="data:image/png;base64,{base64.b64encode(png).decode()}" '
        f'style="max-width:100%"><figcaption>{esc(caption)}</figcaption></figure>'
        for caption, png in found.pictures
    )
    return f"<p>{keys}</p>{figures}{note(esc(found.note))}"
