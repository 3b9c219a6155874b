"""Makes a notebook of each program of examples/gallery/; docs/conf.py builds them with the site, as downloads.

python docs/notebooks.py FOLDER        write them there

A notebook is JSON (nbformat 4.5). The same program gives the same bytes.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).resolve().parents[1] / "examples" / "gallery"


def notebook(program: Path) -> str:
    """The text of a program's notebook: what the program shows, its definitions, and the call of ``main``.

    Raises:
        ValueError: the program does not end with a call of ``main`` as a script does.
    """
    source, name = program.read_text(encoding="utf-8"), program.stem
    about, *_, last = ast.parse(source).body
    if not source.rstrip().endswith('if __name__ == "__main__":\n    main()'):
        raise ValueError(f"{program}: it does not end with a call of main")
    lines = source.splitlines()
    first, *more = (ast.get_docstring(ast.parse(source)) or "").splitlines()
    text = "\n".join(line for line in more if not line.startswith("python examples/")).strip()
    body = "\n".join(lines[about.end_lineno or 1 : last.lineno - 1]).strip()
    call = "main()"
    if f'"{name}:' in body:  # the experiment imports the program by its name
        body, call = f"%%writefile {name}.py\n{body}", f"from {name} import main\n\nmain()"
    cells = [_cell("markdown", f"# {first}\n\n{text}".strip()), _cell("code", body), _cell("code", call)]
    for place, cell in enumerate(cells):
        cell["id"] = f"{name}-{place}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(made, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _cell(kind: str, text: str) -> dict[str, Any]:
    code = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "metadata": {}, "source": text.splitlines(keepends=True)} | code


def write(folder: Path) -> list[Path]:
    """Write all notebooks; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for program in sorted(PROGRAMS.glob("*.py")):
        made.append(folder / f"{program.stem}.ipynb")
        made[-1].write_text(notebook(program), encoding="utf-8")
    return made


if __name__ == "__main__":
    sys.stdout.writelines(f"{path}\n" for path in write(Path(sys.argv[1])))
