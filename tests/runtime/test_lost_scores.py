"""Validation losses choose a round and a learning rate; those that lack a client's rows are of other rows."""

from types import SimpleNamespace

import pytest

import fedfm
from fedfm.api import studies
from fedfm.config.experiment import Experiment
from fedfm.errors import RunError
from fedfm.methods.fedms.fedms import FedMS
from fedfm.runtime import early_stopping, validation_losses
from fedfm.runtime.client import Silos
from fedfm.runtime.progress import Progress
from small import experiment


class Notices(Progress):
    """Keeps what a study says."""

    def __init__(self):
        self.texts = []

    def notice(self, text):
        self.texts.append(text)


def tables(folder, **method):
    found = experiment(folder, method={"name": "fedavg", "rounds": 4, "local": {"learning_rate": 0.01}} | method)
    found["data"] |= {"val_fraction": 0.3}
    return found


@pytest.fixture
def fail(monkeypatch):
    """Lets scores on validation rows fail where a test says so, by (client, request)."""
    answer, where = Silos._answer, []

    def answers(self, request):
        if request.payload.get("part") == "val" and any(of(self, request) for of in where):
            raise ValueError("no memory")
        return answer(self, request)

    monkeypatch.setattr(Silos, "_answer", answers)
    return where.append


def test_a_round_without_a_clients_scores_is_compared_over_the_others(tmp_path, fail):
    whole = tables(tmp_path, local={"learning_rate": 1e-4})  # so that each round is a little better
    whole["run"] |= {"patience": 3}
    first = fedfm.run(whole, tmp_path / "first", progress=Progress())
    lines = fedfm.load_run(tmp_path / "first").metrics()
    worst = max(lines[1]["client_val_loss"], key=lines[1]["client_val_loss"].get)
    fail(lambda silos, request: request.client == worst and request.round == 1)
    second = fedfm.run(whole, tmp_path / "second", progress=Progress())
    found = fedfm.load_run(tmp_path / "second").metrics()
    assert found[1]["val_loss"] < min(line["val_loss"] for line in found[2:])  # the fewest rows, and the easiest
    assert second["details"]["model_of_round"] == first["details"]["model_of_round"] == 4


def line(t, **losses):
    of = {"client_val_loss": losses, "client_val_rows": dict.fromkeys(losses, 10)}
    return {"round": t, "val_loss": sum(losses.values()) / len(losses), **of}


@pytest.mark.parametrize(
    ("lines", "best"),
    [
        ([line(1, a=2.0, b=4.0), line(2, a=1.5), line(3, a=1.4, b=3.0)], 3),
        ([line(1, a=2.0, b=4.0), line(2, a=2.5), line(3, a=2.2)], 1),  # b is gone, and a did not get better
        ([line(1, a=2.0), line(2, b=1.0)], 1),  # nothing is known of which is better
        ([line(0, a=0.1), line(1, a=2.0), line(2, a=2.0)], 1),
        ([{"round": 1, "val_loss": 2.0}, {"round": 2, "val_loss": 1.0}, {"round": 3, "val_loss": None}], 2),
        ([], None),
    ],
)
def test_the_best_round(lines, best):
    assert validation_losses.best_round(lines) == best
    assert validation_losses.last_validated(lines) == max(
        (m["round"] for m in lines if m["round"] and m["val_loss"]), default=None
    )


def test_a_rate_whose_loss_lacks_a_client_is_not_chosen(tmp_path, fail):
    chosen = Experiment.from_dict(tables(tmp_path, rounds=1))
    rates = (0.1, 0.0001)

    def is_hard(silos, request):
        return request.client == hard and silos.method.local.learning_rate == rates[1]

    hard = ""
    fail(is_hard)
    best = studies.tune(chosen, rates, tmp_path / "first", Progress())
    assert best.method.local.learning_rate == rates[0]
    hard, said = fedfm.load_run(tmp_path / "first-tune" / "rate-0.1").manifest["clients"][0], Notices()
    assert studies.tune(chosen, rates, tmp_path / "second", said).method.local.learning_rate == rates[0]
    assert any(
        f"learning rate 0.0001 is not compared: its loss lacks the rows of {hard}" in text for text in said.texts
    )
    fail(lambda silos, request: request.client != hard and silos.method.local.learning_rate == rates[0])
    with pytest.raises(RunError, match="gave a validation loss of all clients"):
        studies.tune(chosen, rates, tmp_path / "third", Progress())


def test_an_early_stop_waits_until_the_model_is_complete():
    """The second stage of FedMS has its own models: a stop in the first one would leave them out."""
    method = FedMS(global_rounds=3, local_rounds=5)
    for rounds, best, over in ((3, None, False), (5, 4, False), (6, 4, True)):
        lines = [line(t, a=float(t)) for t in range(rounds + 1)]  # it only gets worse
        run = SimpleNamespace(metrics=lambda: lines)  # noqa: B023
        run.experiment = SimpleNamespace(run=SimpleNamespace(patience=2), method=method)
        assert (early_stopping.best_round(run), early_stopping.patience_over(run)) == (best, over)
    assert FedMS(local_rounds=0).traits.complete_from == 0
