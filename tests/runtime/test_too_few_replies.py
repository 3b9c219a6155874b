"""A run that stops because too few clients answer."""

import pytest

import fedfm
import small
from fedfm.errors import RunError
from fedfm.runtime.progress import Progress


def test_a_run_that_diverges_says_why_and_what_to_do(tmp_path):
    far = small.experiment(tmp_path, method={"fraction": 1.0, "local": {"learning_rate": 1e30, "epochs": 20}})
    with pytest.raises(RunError) as error:
        fedfm.run(far, tmp_path / "run", progress=Progress())
    text = str(error.value)
    assert "0 of 5 clients gave a valid reply" in text
    assert "3 are needed (run.min_clients)" in text
    assert "training diverged; take a smaller method.local.learning_rate" in text
    (note,) = error.value.__notes__
    assert note == f"committed rounds are kept; continue with fedfm.resume({str(tmp_path / 'run')!r})"
