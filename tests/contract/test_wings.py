"""A run of any other method loads no module of `encrypted/` or `sites/`."""

import json
import subprocess
import sys

import pytest

from every_method import experiment_of
from fedfm.config.experiment import Experiment

CODE = """
import json, sys
from fedfm.cli import main
code = main(sys.argv[1:])
print(json.dumps([code, sorted(n for n in sys.modules if n.startswith(("fedfm.encrypted", "fedfm.sites", "tenseal")))]))
"""


@pytest.mark.proof
@pytest.mark.parametrize("command", ["run", "check"])
def test_a_run_of_fedavg_loads_no_wing(command, tmp_path):
    experiment = Experiment.from_dict(experiment_of("fedavg", tmp_path))
    path = tmp_path / "exp.toml"
    path.write_text(experiment.to_toml())
    out = ["--out", str(tmp_path / "run")] if command == "run" else []
    done = subprocess.run(
        [sys.executable, "-c", CODE, command, str(path), *out], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [0, []]
