"""Files in rows: their content counts in fingerprints and in the search for repeated rows, their paths do not."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfm.core.attachments import Attachment, attachments_of
from fedfm.data.sources._attachments import attachments
from fedfm.data.table import Table, contents, fingerprint
from fedfm.errors import InputError


def table(rows: list[tuple[object, ...]]) -> Table:
    return Table("tagged", rows, None, (), np.array(["train"] * len(rows)))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=4), min_size=1, max_size=4), st.booleans())
def test_a_fingerprint_covers_contents_and_no_paths(
    tmp_path_factory: pytest.TempPathFactory, data: list[bytes], deep: bool
) -> None:
    folder = tmp_path_factory.mktemp("files")
    paths = [folder / str(i) for i in range(len(data))]
    for path, content in zip(paths, data, strict=True):
        path.write_bytes(content)

    def rows(files: list[Attachment]) -> Table:
        return table([("text", (("user", f),) if deep else f) for f in files])

    one = fingerprint(rows([Attachment(content) for content in data]))
    assert fingerprint(rows([Attachment(str(path)) for path in paths])) == one
    changed = [Attachment(content) for content in data]
    changed[-1] = Attachment(data[-1] + b"x")
    assert fingerprint(rows(changed)) != one


def test_texts_of_a_row_leave_attachments_out() -> None:
    file = Attachment(b"image")
    row = (file, "a", (("user", "b", file), file), ("c", file))
    assert list(contents(row)) == ["a", "b", "c"]
    assert list(attachments_of(row)) == [file] * 4


def test_cells_are_paths_or_contents(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"1")
    cells = ["a.png", b"2", {"bytes": b"3", "path": "no"}, {"bytes": None, "path": "a.png"}]
    found = attachments(cells, "image", "row {}".format, str(tmp_path / "rows.csv"), "an image")
    assert [f.content() for f in found] == [b"1", b"2", b"3", b"1"]
    for wrong, words in (("b.png", 'no file .*b.png .did you mean "a.png"'), ("", "path of an image"), (3, "holds 3")):
        with pytest.raises(InputError, match=f"row 0: .*{words}"):
            attachments([wrong], "image", "row {}".format, str(tmp_path / "rows.csv"), "an image")


def test_rows_with_other_files_are_not_repeated_rows() -> None:
    from fedfm.data.repeats import _wording

    assert _wording(("Look.", Attachment(b"1"))) != _wording(("look.", Attachment(b"2")))
    assert _wording(("Look.", Attachment(b"1"))) == _wording(("look. ", Attachment(b"1")))


def test_a_changed_file_has_another_hash(tmp_path: Path) -> None:
    """Noise is bound to a digest of the rows, so a file that changed between two rounds must not keep its hash."""
    path = tmp_path / "a.png"
    path.write_bytes(b"1")
    file = Attachment(str(path))
    before = file.sha256, fingerprint(table([("text", file)]))
    path.write_bytes(b"2")
    assert not {file.sha256, fingerprint(table([("text", file)]))} & {*before}
