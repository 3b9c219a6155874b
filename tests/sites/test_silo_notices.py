"""Notices to a silo about the model on its rows: in its log, and by ``fedfm silo check``."""

import json
import sys
import textwrap

import numpy as np
import pytest
from test_kits import examined, provision

from fedfm.config.experiment import Experiment
from fedfm.config.toml import to_toml
from fedfm.sites.silo_session import SiloSession

FUNCTION = "ward_of_notices:ward"
OWN = """
    import torch
    from torch import nn


    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x):
            return self.used(x)


    def ward():
        x = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
        rows = [(row, int(row[0] > 0)) for row in x]
        return {"model": Net(), "train": rows, "loss": nn.functional.cross_entropy, "classes": ["a", "b"]}
"""


@pytest.fixture
def silo(tmp_path, monkeypatch):
    """A kit, and how to change a line of its file."""
    kit = provision(tmp_path) / "hospital-a"
    (kit / "ward_of_notices.py").write_text(textwrap.dedent(OWN))
    monkeypatch.syspath_prepend(kit)
    file = kit / "silo.toml"
    file.chmod(0o600)

    def change(old, new):
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))

    yield kit, change
    sys.modules.pop("ward_of_notices", None)


def log_and_check(kit, tables, capsys):
    """(the silo's log of the run, lines of the check)."""
    tables |= {"method": {"name": "fedavg", "rounds": 1}, "run": {"engine": "deployment"}}
    experiment = kit.parent / "exp.toml"
    experiment.write_text(to_toml(tables))
    lines = examined(capsys, kit, experiment)[1]
    own = SiloSession(kit / "state/run/site", {"silo": str(kit / "silo.toml")})
    own.populate(Experiment.from_dict(tables, imports=True), ["a", "b"])
    return own.log.path.read_text(), lines


def test_of_a_module_that_its_own_function_brings(silo, capsys):
    kit, change = silo
    change('"rows.csv"', json.dumps(FUNCTION))
    log, found = log_and_check(kit, {"data": {"name": FUNCTION}, "model": {"name": FUNCTION}}, capsys)
    assert (found["classes"][0], found["model"][0], found["notice"][0]) == ("note", "ok", "note")
    for text in (log, found["notice"][1]):
        assert "2 of 4 trained tensors get no gradient from the first rows" in text
        assert "unused.weight, unused.bias" in text


def test_of_a_foundation_model(silo, capsys):
    from transformers import Dinov2Config, Dinov2ForImageClassification, ViTImageProcessorPil

    kit, change = silo
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "mlp_ratio": 1}
    config = Dinov2Config(**shape, image_size=16, patch_size=8, num_labels=3)
    Dinov2ForImageClassification(config).save_pretrained(kit / "dino")
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(kit / "dino")
    pictures = np.random.default_rng(0).integers(0, 256, (20, 16, 16, 3)).astype(np.uint8)
    np.savez(kit / "rows.npz", x=pictures, y=np.arange(20) % 2, classes=np.array(["a", "b"]))
    change("rows.csv", "rows.npz")
    change("models = []", f'models = ["{kit / "dino"}"]')
    data, model = {"kind": "image", "classes": ["a", "b"]}, {"name": "dino", "adaptation": {"name": "full"}}
    log, found = log_and_check(kit, {"data": data, "model": model}, capsys)
    assert (found["classes"][0], found["model"][0], found["notice"][0]) == ("ok", "ok", "note")
    for text in (log, found["notice"][1]):
        assert "dinov2.embeddings.mask_token" in text
