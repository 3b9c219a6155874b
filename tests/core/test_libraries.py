"""Errors of libraries become a line about the input; a defect of fedfm stays a defect."""

import pytest
import torch

from fedfm.cli import main
from fedfm.core import libraries
from fedfm.errors import InputError
from fedfm.linalg.params import Params


class TestRefusing:
    def test_a_librarys_error_becomes_a_line_about_the_input(self):
        with pytest.raises(InputError, match=r"^data: rows: RuntimeError: ") as found, libraries.refuse("data: rows"):
            torch.nn.functional.conv2d(torch.zeros(1, 1, 2, 2), torch.zeros(1, 2, 3, 3))
        assert isinstance(found.value.__cause__, RuntimeError)

    @pytest.mark.parametrize("error", [OSError("no tokenizer there"), ImportError("no package of that name")])
    def test_errors_of_libraries_on_their_files_and_packages_become_input_errors(self, error):
        with pytest.raises(InputError, match=str(error)), libraries.refuse("model.name"):
            raise error

    def test_the_first_words_of_a_message_after_an_empty_line_are_shown(self):
        with pytest.raises(InputError, match=r"^model: ImportError: needs timm$"), libraries.refuse("model"):
            raise ImportError("\nneeds timm\nby pip")

    def test_a_defect_of_ours_passes(self):
        with pytest.raises(KeyError), libraries.refuse("data"):
            Params({"a": torch.zeros(2)})["b"]

    @pytest.mark.parametrize(
        "error", [MemoryError(), FileNotFoundError(2, "no such file", "x"), torch.OutOfMemoryError("full")]
    )
    def test_errors_that_the_input_did_not_cause_pass_unchanged(self, error):
        with pytest.raises(type(error)), libraries.refuse("data"):
            raise error


def test_a_defect_is_one_line_that_says_where_the_traceback_is(tmp_path, monkeypatch, capsys):
    def broken(args):
        raise ZeroDivisionError("by nothing")

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("fedfm.cli.commands.listing", broken)
    assert main(["list", "methods"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    (file,) = tmp_path.iterdir()
    assert line.startswith("fedfm: ZeroDivisionError: by nothing (")
    assert str(file) in line
    assert "in broken" in file.read_text()
    assert file.stat().st_mode & 0o077 == 0
