"""Frequently guessed keys are understood, and `fedfm show` prints TOML."""

import tomllib

import pytest

import small
from fedfm.cli import main
from fedfm.config import catalogue, registry
from fedfm.config.experiment import Experiment
from fedfm.config.registry import ours, resolve
from fedfm.config.toml import to_toml
from fedfm.core.fields import settings_of
from fedfm.errors import InputError


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("method.lr=0.1", "did you mean method.local.learning_rate?"),
        ("method.local.lr=0.1", 'did you mean "learning_rate"?'),
        ("method.local.batch=8", 'did you mean "batch_size"?'),
        ("method.epochs=3", "did you mean method.local.epochs?"),
        ("method.optimizer=adam", "did you mean method.local.name"),
        ("method.local.optimizer=adam", "did you mean method.local.name"),
        ("method.lambda=0.1", "method.mu is a key of fedamp, fedpgp, fedprox; with"),
        ("method.mu=0.1", 'fedprox; with method.local.name = "proximal" there is method.local.mu'),
        ("method.local.mu=0.1", 'with method.local.name = "proximal" there is method.local.mu'),
        ("method.server_momentum=0.9", "method.server_momentum is a key of fedavgm"),
        ("model.path=gpt2", 'did you mean "name"?'),
        ("model.lora_alpha=16", "did you mean model.adaptation.alpha?"),
        ("model.lora_rank=16", "did you mean model.adaptation.rank?"),
        ("data.alpha=0.1", "did you mean data.partition.alpha?"),
        ("data.num_clients=10", "did you mean data.partition.clients, e.g. 10?"),
        ("method.opt=adam", "did you mean method.local.name"),
        ("method.local.opt=adam", "did you mean"),
        ("local.opt=adam", "did you mean method.local?"),
        ("lr=0.1", "did you mean method.local.learning_rate?"),
        ("seed=3", "did you mean run.seed?"),
        ("run.rounds=3", "did you mean method.rounds?"),
        ("model.rank=4", "did you mean model.adaptation.rank?"),
        ("method.batchsize=4", "did you mean method.local.batch_size?"),
        ("run.n_jobs=2", 'did you mean "workers"?'),
        ("run.use_cuda=true", 'did you mean model.device, e.g. "cuda"?'),
        ("data.dataset=rows.npz", 'did you mean "path"?'),
        ("run.clients_per_round=2", "did you mean method.fraction, e.g. 0.2?"),
        ("data.file=rows.npz", 'did you mean "path"?'),
        ("aggregation.rule=median", 'did you mean "name"?); [aggregation] takes a "name" alone'),
        ("data.partition.type=iid", 'did you mean "name"?'),
        ("model.adaptation.method=lora", 'did you mean "name"?'),
        ("method.fractoin=0.5", 'did you mean "fraction"?'),
    ],
)
def test_keys_that_everybody_guesses(tmp_path, capsys, key, hint):
    path = tmp_path / "exp.toml"
    path.write_text(to_toml(small.experiment(tmp_path)))
    assert main(["check", str(path), "--set", key]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert hint in line


def test_a_method_without_a_client_optimiser_is_not_sent_to_one(tmp_path):
    tables = small.experiment(tmp_path)
    tables["method"] = {"name": "fedncm", "lr": 0.1}
    with pytest.raises(InputError, match=r"this method has no client optimiser, hence no \[method.local\]"):
        Experiment.from_dict(tables)


def test_lambda_is_mu_of_fedprox(tmp_path):
    with pytest.raises(InputError, match='did you mean "mu"'):
        Experiment.from_dict(small.experiment(tmp_path, method={"name": "fedprox", "lambda": 0.1}))


@pytest.mark.parametrize("name", [*ours("methods"), *ours("attacks"), *ours("aggregation")])
def test_show_prints_toml(name):
    """Whatever stands there can be copied into a file; every key of it is one that the method takes."""
    table = next(iter(tomllib.loads(catalogue.method(name)).values()))
    assert table["name"] == name
    kind = next(k for k in ("methods", "attacks", "aggregation") if name in ours(k))
    known = {key for key, _, _ in settings_of(resolve(kind, name))} | {"name"}
    assert set(table) <= known


OWN = '''
"""Late: a method of one's own.

A line about it.
"""

from dataclasses import dataclass

from fedfm import setting
from fedfm.methods.fedavg import FedAvg
from fedfm.training import AdamW, Local


@dataclass(frozen=True)
class Late(FedAvg):
    eta: float = setting(0.5, "step", gt=0)
    head: float = setting(2.0, "a number here, no table")
    local: Local = setting(AdamW(learning_rate=0.02), "client optimiser")


@dataclass(frozen=True)
class Later(Late):
    """Later than Late."""

    local: Local = setting(AdamW, "client optimiser")
    beside: Local = setting(AdamW(), "a second one")
'''


def test_show_of_ones_own_class_has_its_text_and_its_optimiser(tmp_path, monkeypatch, capsys):
    (tmp_path / "late_methods.py").write_text(OWN.lstrip())
    monkeypatch.syspath_prepend(tmp_path)
    found = {}
    for name in ("Late", "Later"):
        assert main(["show", f"late_methods:{name}"]) == 0
        found[name] = capsys.readouterr().out
    head = "# Late: a method of one's own.\n#\n# A line about it.\n\n"
    assert found["Late"].startswith(head + "[method]\n")
    assert found["Later"].startswith(head.rstrip("\n") + "\n#\n# Later than Late.\n\n[method]\n")
    late, later = (tomllib.loads(text)["method"] for text in found.values())
    assert (late["name"], late["eta"], late["head"]) == ("late_methods:Late", 0.5, 2.0)
    assert (late["local"]["name"], late["local"]["learning_rate"]) == ("adamw", 0.02)
    assert late["local"].keys() == tomllib.loads(catalogue.method("fedclip"))["method"]["local"].keys()
    assert (later["local"]["learning_rate"], "beside" in later) == (0.001, False)
    assert "# beside = ..." in found["Later"]


@pytest.mark.parametrize("name", [*ours("methods"), *ours("aggregation")])
def test_show_of_a_class_by_its_place_is_that_by_its_name(name, monkeypatch):
    """The one comes from the class, the other from the schema: the same keys and the same defaults."""
    monkeypatch.setattr(registry, "_admitted", {})
    kind = next(k for k in ("methods", "aggregation") if name in ours(k))
    cls = resolve(kind, name)
    place = f"{cls.__module__}:{cls.__name__}"
    assert catalogue.method(place).replace(f'"{place}"', f'"{name}"') == catalogue.method(name)


CONTRACT = (
    "fedavg fedprox fedadam fedyogi fedavgm scaffold local centralised zero_shot fedpft fedbaf fedbip fedms blindfed "
    "fedncm ccvr fedbe fedkt dsfl fedfed ensemble average kd fedamp fedala fedawa ldawa ditto feddpa fedper fedrep "
    "flora flexlora fedex_lora raflora promptfl fedclip median trimmed_mean krum multi_krum geometric_median "
    "norm_clipping label_shuffle sign_flip scaled_update backdoor reversed_weights FFA-LoRA DoRA FedBuff DP-SGD SecAgg"
)


@pytest.mark.parametrize("name", CONTRACT.split())
def test_a_name_from_a_paper_is_shown_or_says_how_to_set_it(name, capsys):
    code = main(["show", name])
    told = capsys.readouterr()
    assert code == 0 or "(here it is " in told.err
    if code:
        with pytest.raises(InputError, match=r"\(here it is "):
            resolve("methods", name)
