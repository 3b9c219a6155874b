"""A client with several processes: messages, settings, and what is refused before any process starts."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fedfm.config.experiment import Experiment
from fedfm.core.client import Terms
from fedfm.core.rows import Rows
from fedfm.core.tokens import Tokens
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.sites import silo_config
from fedfm.training import SGD, AdamW, Proximal
from fedfm.training.sharded import messages
from fedfm.training.sharded.group import environment
from fedfm.training.sharded.rank import RankPlace
from fedfm.training.sharded.settings import place_of
from fedfm.training.sharded.shards import rows_of

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "many-gpus.md"


def tables(folder, **changes):
    """An experiment that a group can compute, with these changes of keys such as ``run__workers``."""
    found = {
        "data": {"path": str(folder / "rows.jsonl"), "partition": {"name": "iid", "clients": 2}},
        "model": {"name": str(folder), "task": "language_modelling", "adaptation": {"name": "lora"}},
        "method": {"name": "fedavg", "rounds": 1},
        "run": {"processes_per_client": 2},
    }
    for key, value in changes.items():
        table, _, name = key.partition("__")
        found.setdefault(table, {})[name] = value
    return found


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"run__engine": "simulation"}, 'on engine = "simulation" only silos'),
        ({"run__engine": "deployment"}, 'on engine = "deployment" only silos'),
        ({"run__workers": 2}, "clients take turns"),
        ({"run__gpus_per_client": 2.0}, "each process takes one GPU"),
        ({"run__kernels": "fast"}, "cohorts are packed in one process"),
        ({"model__quantization": "int8"}, 'model.quantization = "int8" is computed by one process'),
        ({"model__compile": True}, "compiled blocks cannot collect their weights"),
        ({"model__device": "auto-map"}, "each process takes a device of its own"),
        ({"model__device": "cuda:1"}, "each process takes a device of its own"),
        ({"model__weights": "random"}, "no file that processes could read in parts"),
        ({"model__name": "nano-vit"}, "is not a folder or hub id"),
        ({"model__adaptation": {"name": "lora", "dora": True}}, "dora reads the norms of whole matrices"),
        ({"model__adaptation": {"name": "prompt"}}, "is trained by one process"),
        ({"method": {"name": "fedala", "rounds": 1}}, "does not declare rows_by_optimiser"),
        ({"method__local": {"name": "ditto"}}, "the client optimiser DittoOptimiser trains in one process"),
        ({"attack": {"name": "sign_flip", "fraction": 0.5}}, "[attack] replaces client halves"),
        (
            {
                "privacy": {
                    "mechanism": "dp_sgd",
                    "unit": "record",
                    "clip_norm": 1.0,
                    "target_epsilon": 8.0,
                    "delta": 1e-5,
                }
            },
            "it reads the gradients of single rows",
        ),
    ],
)
def test_unsupported_settings_are_refused_in_one_line(tmp_path, changes, says):
    whole = {key: value for key, value in changes.items() if "__" not in key}
    some = {key: value for key, value in changes.items() if "__" in key}
    with pytest.raises(InputError) as found:
        Experiment.from_dict(tables(tmp_path, **some) | whole)
    lines = [str(error) for error in found.value.all]
    assert any(says in line and "\n" not in line for line in lines), lines


def test_settings_that_process_groups_support_are_accepted(tmp_path):
    for changes in ({}, {"model__dtype": "bfloat16"}, {"method__local": {"name": "proximal"}}):
        assert Experiment.from_dict(tables(tmp_path, **changes)).run.processes_per_client == 2


@given(st.integers(1, 300), st.integers(1, 12))
def test_ranks_have_each_row_once(count, ranks):
    """In the order and the sizes of ``torch.chunk``, which FSDP uses."""
    found = [list(range(count))[rows_of(count, rank, ranks)] for rank in range(ranks)]
    assert [row for part in found for row in part] == list(range(count))
    chunks = [chunk.tolist() for chunk in torch.arange(count).chunk(ranks)]
    assert found == chunks + [[]] * (ranks - len(chunks))


def test_messages_keep_their_values():
    local = AdamW(learning_rate=0.01, micro_batch=2, betas=(0.8, 0.9))
    assert messages.local_of(messages.of_local(local)) == local
    assert messages.local_of(messages.of_local(Proximal(mu=0.5))) == Proximal(mu=0.5)
    spec = ModelSpec(
        "/m", task="instruction", template="plain", answer_tokens=3, adaptation=AdaptationSpec(targets=("q", "v"))
    )
    assert messages.spec_of(messages.of_spec(spec)) == spec
    correction = Params({"a": torch.arange(3.0)})
    sent = messages.decode(messages.encode({"terms": messages.of_terms(Terms(0.1, correction, ("a",)))}))
    found = messages.terms_of(sent["terms"])
    assert (found.mu, found.only) == (0.1, ("a",))
    assert found.correction.sha256() == correction.sha256()


def test_rows_keep_their_values():
    rows = Rows(
        {"answer_start": torch.tensor([1, 2])},
        tokens=Tokens.of([[5, 6, 7], [8]]).take([1, 0]),
        labels=torch.tensor([1, 0]),
        pad=4,
        pairs=(("say", "cat"), ((("user", "hello"), ("tool", "x", "{}")), (("assistant", "", "{}"),))),
        token_arguments={"token_type_ids": Tokens.of([[0, 1, 1], [1]]).take([1, 0])},
    )
    found = messages.rows_of(messages.decode(messages.encode({"rows": messages.of_rows(rows)}))["rows"])
    assert found.sha256() == rows.sha256()
    assert found.pairs == rows.pairs
    whole, again = rows.batch([0, 1]), found.batch([0, 1])
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_an_unknown_optimiser_is_named():
    class Mine(SGD):
        pass

    with pytest.raises(InputError, match="the client optimiser Mine trains in one process"):
        messages.of_local(Mine())


def test_ranks_get_no_secrets(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("FEDFM_ANYTHING", "c")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    found = environment()
    assert not {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "FEDFM_ANYTHING"} & found.keys()
    assert found["SLURM_JOB_ID"] == "7"
    assert found["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, (3, 4, 1)),
        ({"SLURM_PROCID": "9", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1"}, (9, 16, 1)),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, (2, 8, 2)),
    ],
)
def test_launchers_say_which_rank_this_is(variables, place):
    assert RankPlace.of(variables) == place


def test_a_launcher_that_says_nothing_is_refused():
    with pytest.raises(SystemExit, match="neither RANK and WORLD_SIZE nor SLURM_PROCID"):
        RankPlace.of({})


def test_each_folder_has_one_identity(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    assert place_of(str(tmp_path)) == place_of(str(tmp_path / "link"))
    (tmp_path / "other").mkdir()
    assert place_of(str(tmp_path)) != place_of(str(tmp_path / "other"))


def test_a_silo_says_how_many_processes_its_launcher_starts(tmp_path):
    path = tmp_path / "silo.toml"
    path.write_text('name = "a"\ndata = "rows.csv"\nlaunch = "srun"\n')
    with pytest.raises(InputError, match='launch = "srun": set processes to the number of processes that it starts'):
        silo_config.load(path)
    path.write_text('name = "a"\ndata = "rows.csv"\nlaunch = "srun"\nprocesses = 8\n')
    rows = silo_config.load(path).rows
    assert (rows.processes, rows.launch) == (8, "srun")


def test_the_page_has_a_job_and_a_script(tmp_path):
    text = PAGE.read_text()
    job = yaml.safe_load(re.search(r"```yaml\n(.*?)```", text, re.S)[1])
    pod = job["spec"]["template"]["spec"]
    assert (job["kind"], job["apiVersion"], pod["restartPolicy"]) == ("Job", "batch/v1", "OnFailure")
    mounts = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    script = tmp_path / "job.sh"
    script.write_text(re.search(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", text, re.S)[1])
    subprocess.run(["bash", "-n", script], check=True)
