"""DP-SGD against a loop over rows, the accountant of dp_accounting, and an attack that tells neighbours apart."""

import hashlib
import json
import math
import subprocess
import sys

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from scipy import stats
from torch import nn

import fedfm
from fedfm.config.experiment import Experiment
from fedfm.core import storage
from fedfm.core.client import Client, ClientData, Terms
from fedfm.core.rows import Rows
from fedfm.data.table import Table
from fedfm.errors import ClientFault, InputError, RowsChanged, RunError
from fedfm.models.families import Parts
from fedfm.models.load import load_model
from fedfm.models.model import Model
from fedfm.models.preprocessors import Tools
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.privacy.dp_sgd import MEMORY, DescentPlan, PrivateSteps
from fedfm.runtime import file_integrity
from fedfm.runtime.run_directory import Run
from fedfm.training import SGD, Adam, private, row_gradients
from fedfm.training.local_job import Job
from fedfm.training.scheduler import train_client
from small import experiment

KEY = bytes(range(32))
CLASSES = ("ant", "bee", "cow")
DRAW = np.random.default_rng(0)


def head(d=6):
    return load_model(
        ModelSpec("features", adaptation=AdaptationSpec("head")), classes=CLASSES, kind="features", feature_dim=d
    )


def lora():
    model = load_model(
        ModelSpec("nano-vit", adaptation=AdaptationSpec("lora", rank=2)), classes=CLASSES, kind="image", seed=3
    )
    with torch.no_grad():  # B starts at 0, and with it the gradient of A
        for name, p in model.live().items():
            if "lora_B" in name:
                p.copy_(torch.from_numpy(DRAW.normal(0, 0.1, p.shape)))
    return model


class Convolutions(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.a, self.norm = nn.Conv2d(3, 4, 3, stride=2, padding=1), norm
        self.b, self.layer, self.out = nn.Conv2d(4, 6, 3, bias=False), nn.LayerNorm(6), nn.Linear(6, len(CLASSES))

    def forward(self, pixel_values):
        x = torch.relu_(self.norm(self.a(pixel_values)))  # in place, as many networks do
        return self.out(self.layer(self.b(x).mean((2, 3))))


def convolutions(norm=None):
    torch.manual_seed(0)
    return Model(
        Convolutions(norm or nn.GroupNorm(2, 4)),
        spec=ModelSpec("mine"),
        task="classification",
        classes=CLASSES,
        parts=Parts(None, (), None, None, ""),
        tools=Tools(),
        fingerprint="",
        head=None,
    )


def tensors(model, n):
    labels = torch.from_numpy(DRAW.integers(0, len(CLASSES), n))
    if model.adaptation == "head":
        return Rows({"features": torch.from_numpy(DRAW.normal(0, 2, (n, 6))).float()}, labels=labels)
    if model.spec.name == "mine":
        return Rows({"pixel_values": torch.from_numpy(DRAW.normal(size=(n, 3, 12, 12))).float()}, labels=labels)
    pictures = DRAW.integers(0, 256, (n, 32, 32, 3)).astype(np.uint8)
    table = Table("image", list(pictures), labels.numpy(), CLASSES, np.full(n, "train"))
    return model.prepare(table, np.arange(n))


MODELS = [head, lora, convolutions]


def by_hand(model, rows, index, c):
    """The clipped sum by one backward pass a row, in float64."""
    total = 0
    for i in index:
        for p in model.live().values():
            p.grad = None
        model.loss(rows.batch(np.array([i]))).backward()
        g = torch.cat([p.grad.reshape(-1) for p in model.live().values()]).double()
        total = total + g * min(1.0, c / float(g.norm()))
    return total


def summed(model, rows, index, c):
    index = np.asarray(index)
    if model.adaptation == "head":
        return private._head(model, rows, c)(index).double()
    return row_gradients.clipped_sum(model, rows, index, c, model.live()).double()


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("c", [1e-2, 0.5, 1e6])
def test_clipped_sums_are_those_of_a_loop_over_rows(make, c):
    model, index = make(), np.array([0, 3, 4, 8])
    rows = tensors(model, 9)
    expected = by_hand(model, rows, index, c)
    assert (summed(model, rows, index, c) - expected).norm() < 3e-4 * expected.norm()


@pytest.mark.parametrize("make", [lora, convolutions])
def test_layers_are_known_and_the_loop_is_the_same(make, monkeypatch):
    model, index = make(), np.arange(5)
    rows = tensors(model, 5)
    assert row_gradients._of_layers(model, rows.batch(index), model.live(), 5) is not None
    fast = summed(model, rows, index, 0.3)
    monkeypatch.setattr(row_gradients, "terms", lambda use: None)
    assert row_gradients._of_layers(model, rows.batch(index), model.live(), 5) is None
    assert (summed(model, rows, index, 0.3) - fast).norm() < 1e-5


@pytest.mark.parametrize("make", MODELS)
def test_one_row_moves_the_sum_by_c_at_most(make):
    model = make()
    rows, c = tensors(model, 12), 0.05
    if make is head:
        rows.tensors["features"][0] *= 1e4  # an outlier counts no more than others
        with torch.no_grad():  # of a label that the model does not expect: else its gradient is zero
            rows.labels[0] = model.logits(rows.batch([0]))[0].argmin()
    whole = summed(model, rows, np.arange(12), c)
    moves = [float((whole - summed(model, rows, np.delete(np.arange(12), i), c)).norm()) for i in range(12)]
    assert max(moves) <= c
    assert min(moves) > 0.99 * c  # these rows are all clipped: a bound that is never reached would show nothing


@pytest.mark.parametrize("make", [head, convolutions])
def test_a_row_without_a_finite_gradient_counts_nothing(make):
    model = make()
    rows = tensors(model, 4)
    next(iter(rows.tensors.values()))[2] = math.inf
    index = np.arange(4)
    expected = summed(model, rows, np.array([0, 1, 3]), 0.5)
    assert (summed(model, rows, index, 0.5) - expected).norm() < 1e-5


def client(model, rows, plan, key=KEY, memory=None, firsts=None):
    data, firsts = ClientData(lambda: rows, Rows, Rows), {} if firsts is None else firsts
    return Client(
        "c",
        private.hide_rows(data),
        model,
        {} if memory is None else memory,
        seed=5,
        secret=lambda name: hashlib.sha256(key + name.encode()).digest(),
        write_once=firsts.setdefault,
        private=private.Descent(plan, data),
        trainer=train_client,
    )


def plan(z=1.0, c=1.0, rounds=1):
    return DescentPlan(c, 1e-5, rounds, noise_multiplier=z)


def test_noise_has_its_variance_and_each_step_its_own():
    budget = PrivateSteps(plan(z=1.5, c=0.2), client(head(), None, None), 50, 5, 10)
    budget.begin("start")
    n = 100_000
    noise = [budget.noisy(np.zeros(n), step) for step in (0, 1)]
    for x in noise:
        assert abs(stats.chi2(n).cdf(float(x @ x) / 0.3**2) - 0.5) < 0.4999
        assert stats.kstest(x / 0.3, "norm").pvalue > 1e-4
    assert abs(np.corrcoef(noise)[0, 1]) < 0.02
    assert np.array_equal(budget.noisy(np.zeros(n), 0), noise[0])
    step = 2.0 ** (math.frexp(0.3)[1] - 20)
    assert np.array_equal(noise[0] / step, np.round(noise[0] / step))


def test_each_row_has_a_coin_of_its_own():
    n, b, steps = 400, 20, 3000
    budget = PrivateSteps(plan(), client(head(), None, None), n, b, steps)
    budget.begin("start")
    drawn = [budget.batch(step) for step in range(steps)]
    sizes, counts = np.array([len(x) for x in drawn]), np.bincount(np.concatenate(drawn), minlength=n)
    q = b / n
    assert stats.binomtest(int(sizes.sum()), n * steps, q).pvalue > 1e-4
    statistic = ((counts - q * steps) ** 2 / (q * (1 - q) * steps)).sum()
    assert 1e-4 < stats.chi2(n).cdf(statistic) < 1 - 1e-4
    assert abs(sizes.var() / (n * q * (1 - q)) - 1) < 0.15  # not batches of one size
    assert budget.expected_size == b
    assert np.array_equal(PrivateSteps(plan(), client(head(), None, None), 3, 20, 1).batch(0), np.arange(3))


def composed(z, q, times, delta):
    accountant = PLDAccountant()
    accountant.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z)), times)
    return accountant.get_epsilon(delta)


@pytest.mark.proof
def test_epsilon_is_that_of_dp_accounting():
    fixed = DescentPlan(1.0, 1e-5, rounds=3, noise_multiplier=0.9)
    releases = fixed.releases(200, 32, SGD(epochs=2, batch_size=32).steps(200))
    assert releases.rate == 32 / 200
    assert releases.times == 3 * 2 * 7
    assert fixed.epsilon(releases) == pytest.approx(composed(0.9, 0.16, 42, 1e-5), rel=2e-3)
    target = DescentPlan(1.0, 1e-5, rounds=3, target_epsilon=2.0).releases(200, 32, 14)
    assert 1.98 < composed(target.noise_multiplier, 0.16, 42, 1e-5) <= 2.0


@pytest.mark.parametrize("local", [SGD(0.1, batch_size=4, momentum=0.5, weight_decay=0.1), Adam(0.01, batch_size=4)])
@pytest.mark.parametrize("make", [head, convolutions])
def test_steps_are_those_of_the_algorithm(make, local, monkeypatch):
    """Compared with the public optimisers of torch, with the same coins and noise."""
    taken, noises, batch, noisy = [], [], PrivateSteps.batch, PrivateSteps.noisy

    def coins(self, step):
        taken.append(batch(self, step))
        return taken[-1]

    def recorded(self, total, step):
        released = noisy(self, total, step)
        noises.append(released - total)
        return released

    monkeypatch.setattr(PrivateSteps, "batch", coins)
    monkeypatch.setattr(PrivateSteps, "noisy", recorded)
    model = make()
    rows = tensors(model, 10)
    who = client(model, rows, plan(z=0.7, c=0.5))
    w, mu = model.params(), 0.2
    trained = private.train([Job(who, w, local, Terms(mu))])[0]
    assert who.metrics == {}
    assert len(noises) == 3
    assert np.concatenate(noises).std() == pytest.approx(0.35, rel=0.3)
    model.load(w)
    live = model.live()
    kind = torch.optim.Adam if isinstance(local, Adam) else torch.optim.SGD
    more = {} if isinstance(local, Adam) else {"momentum": 0.5}
    matrices, others = ([p for p in live.values() if (p.dim() > 1) is wanted] for wanted in (True, False))
    decay = {} if isinstance(local, Adam) else {"weight_decay": 0.1}
    groups = [{"params": matrices, **decay}, *([{"params": others}] if others else [])]
    optimiser = kind(groups, lr=local.learning_rate, **more)
    for step in range(3):
        g = (by_hand(model, rows, taken[step], 0.5) + torch.from_numpy(noises[step])) / 4
        at = 0
        for name, p in live.items():
            p.grad = (g[at : at + p.numel()].view(p.shape) + mu * (p.detach() - w[name])).to(p)
            at += p.numel()
        optimiser.step()
    assert (model.params() - trained).norm() < 2e-3 * (trained - w).norm()


def train_round(
    model, rows, w, t, firsts, *, rounds=3, seed=None, key=KEY, mu=0.0, correction=None, memory=None, **local
):
    """A round's training; without ``memory`` by a client whose memory was rolled back, as a server can make it."""
    who = client(model, rows, plan(rounds=rounds), key=key, memory=memory, firsts=firsts)
    who.round, who.seed = t, 100 + t if seed is None else seed
    return private.train([Job(who, w, SGD(**{"batch_size": 4} | local), Terms(mu, correction))])[0]


def corrected(rows):
    found = Rows({k: v.clone() for k, v in rows.tensors.items()}, labels=rows.labels.clone())
    next(iter(found.tensors.values()))[7] += 1
    return found


def relabelled(rows):
    found = Rows(rows.tensors, labels=rows.labels.clone())
    found.labels[7] = (found.labels[7] + 1) % len(CLASSES)
    return found


@pytest.mark.parametrize("memory", [None, {}], ids=["rolled back", "kept"])
def test_a_repeated_round_repeats_its_bits_and_its_noise_covers_nothing_else(memory):
    model, firsts = head(), {}
    rows, w = tensors(model, 10), model.params()
    first = train_round(model, rows, w, 2, firsts, memory=memory)
    assert train_round(model, rows, w, 2, firsts, memory=memory).sha256() == first.sha256()
    other = [
        {"w": first},
        {"rows": corrected(rows)},
        {"rows": relabelled(rows)},
        {"rows": rows.take(range(9))},
        {"seed": 1},
        {"mu": 0.5},
        {"correction": w * 0.0},
        {"batch_size": 5},
        {"epochs": 2},
        {"learning_rate": 0.2},
    ]
    for change in other:
        given = {"rows": rows, "w": w} | change
        with pytest.raises(RowsChanged, match=r"from another start|number of training rows changed"):
            train_round(model, given.pop("rows"), given.pop("w"), 2, firsts, memory=memory, **given)
    with pytest.raises(ClientFault, match="round 1 comes after round 2"):
        train_round(model, rows, w, 1, firsts, memory=memory)
    assert train_round(model, rows, w, 2, firsts, memory=memory).sha256() == first.sha256()
    assert sum(name.startswith("dp_sgd-place") for name in firsts) == 1  # no try has spent a step


def test_all_steps_are_spent_once_in_any_order_and_after_kills():
    model, firsts = head(), {}
    rows, w = tensors(model, 10), model.params()
    found = [train_round(model, rows, w, t, firsts).sha256() for t in (1, 4, 9)]  # of one start, yet of a round each
    assert len({*found}) == 3
    assert [train_round(model, rows, w, t, firsts).sha256() for t in (1, 4, 9)] == found
    with pytest.raises(ClientFault, match="9 of 9 private steps are taken"):
        train_round(model, rows, w, 10, firsts)
    for t in (2, 5, 8):
        with pytest.raises(ClientFault, match="comes after round"):
            train_round(model, rows, w, t, firsts)


def test_the_number_of_rows_is_that_for_which_noise_and_coins_were_chosen():
    """With more rows the coins would take each row more often than the silo's ledger counts for their number."""
    model, firsts = head(), {}
    rows, w = tensors(model, 10), model.params()
    train_round(model, rows, w, 1, firsts)
    for memory in (None, {}):
        with pytest.raises(RowsChanged, match="number of training rows changed"):
            train_round(model, rows.take(range(8)), w, 2, firsts, memory=memory)
    train_round(model, corrected(rows), w, 2, firsts)


def test_a_kill_before_the_answer_costs_its_round_and_no_other(monkeypatch):
    model, firsts = head(), {}
    rows, w = tensors(model, 10), model.params()
    whole = train_round(model, rows, w, 1, {}).sha256()
    with monkeypatch.context() as patch:
        patch.setattr(PrivateSteps, "end", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train_round(model, rows, w, 1, firsts)
    assert train_round(model, rows, w, 1, firsts).sha256() == whole
    assert train_round(model, rows, w * 2.0, 2, firsts).sha256() != whole  # the next round has places of its own


def test_a_repetition_that_comes_to_other_sums_is_refused(monkeypatch):
    """As on another processor: the start is the same, and the bits are not."""
    model, firsts = head(), {}
    rows, w = tensors(model, 10), model.params()
    train_round(model, rows, w, 1, firsts)
    monkeypatch.setattr(private, "sums", lambda *given: lambda index: torch.full((21,), 1e-9, dtype=torch.float64))
    with pytest.raises(ClientFault, match="did not give the same bits"):
        train_round(model, rows, w, 1, firsts)


def test_a_restored_backup_gives_noise_of_its_own():
    """A memory that was copied back has forgotten the round: what is asked again shares no noise with the answer."""
    model = head()
    rows, w = tensors(model, 10), model.params() * 0.0
    first, backup = {}, {}
    one, two = train_round(model, rows, w, 1, first), train_round(model, corrected(rows), w, 1, backup)
    apart = torch.cat([(one - two)[name].reshape(-1) for name in model.live()])
    assert float(apart.norm()) > 0.5 * float(one.norm())


def test_a_client_half_can_only_count_its_rows():
    model = head()
    who = client(model, tensors(model, 7), plan())
    assert len(who.data.train) == 7
    for name in ("labels", "tensors", "batch", "labelled", "take"):
        with pytest.raises(InputError, match="past the private optimiser"):
            getattr(who.data.train, name)


def test_training_that_does_not_train_is_found_before_the_second_step(monkeypatch):
    model = convolutions()
    rows = tensors(model, 8)
    steps = []
    step_of = private.Rule.step

    def stuck(rule, p, g):
        steps.append(1)
        p[:10].copy_(torch.cat([t.reshape(-1) for t in w.values()])[:10])

    w = model.params()
    with monkeypatch.context() as patch:
        patch.setattr(private.Rule, "step", stuck)
        with pytest.raises(RunError, match="did not move in the first private step"):
            private.train([Job(client(model, rows, plan()), w, SGD(batch_size=2))])
    assert len(steps) == 1

    model.module.out.weight.requires_grad_(False)
    frozen = Model(
        model.module,
        spec=model.spec,
        task="classification",
        classes=CLASSES,
        parts=model.parts,
        tools=Tools(),
        fingerprint="",
        head=None,
    )

    def leaking(rule, p, g):
        steps.append(2)
        step_of(rule, p, g)
        model.module.out.weight.data[0, 0] += 1

    monkeypatch.setattr(private.Rule, "step", leaking)
    with pytest.raises(RunError, match=r"out\.weight is frozen but changed"):
        private.train([Job(client(frozen, rows, plan()), frozen.params(), SGD(batch_size=2))])
    assert steps == [1, 2]


def test_batch_norm_that_mixes_rows_is_refused():
    model = convolutions(nn.BatchNorm2d(4))
    with pytest.raises(InputError, match="batch norm mix the rows"):
        private.train([Job(client(model, tensors(model, 8), plan()), model.params(), SGD())])


# --- an attack --------------------------------------------------------------------------------------------------------
def attacked(trials):
    """Outputs of one step on neighbouring data sets, projected on the direction in which they differ."""
    model = head()
    rows = Rows({"features": torch.zeros(4, 6)}, labels=torch.zeros(4, dtype=torch.int64))
    rows.tensors["features"][0] = 50.0  # the row that only one of the data sets has
    w, local = model.params() * 0.0, SGD(1.0, batch_size=4)  # q = 1: nothing but the noise hides it
    index = np.array([0])
    model.load(w)
    direction = by_hand(model, rows, index, 1.0)
    direction = direction / direction.norm()
    found = []
    for half, without in ((0, False), (1, True)):
        data = Rows({"features": rows.tensors["features"].clone()}, labels=rows.labels)
        outputs = []
        for trial in range(trials):
            who = client(model, data, plan(z=1.0), key=f"{half} {trial}".encode().ljust(32))
            if without:  # a missing row adds nothing to any sum
                keep = PrivateSteps.batch
                PrivateSteps.batch = lambda self, step: np.arange(1, 4)
            try:
                trained = private.train([Job(who, w, local)])[0]
            finally:
                if without:
                    PrivateSteps.batch = keep
            change = torch.cat([(trained - w)[name].reshape(-1) for name in model.live()]).double()
            outputs.append(-4 * float(change @ direction))
        found.append(np.array(outputs))
    return found


def least_mu(with_row, without):
    """A lower 99.9 % confidence bound on the Gaussian privacy mu, over one threshold."""
    t = 0.5 * (with_row.mean() + without.mean())
    above = stats.binomtest(int((with_row > t).sum()), len(with_row)).proportion_ci(0.998, "exact").low
    false = stats.binomtest(int((without > t).sum()), len(without)).proportion_ci(0.998, "exact").high
    return stats.norm.ppf(above) - stats.norm.ppf(false)


@pytest.mark.proof
def test_an_attack_gets_what_is_promised_and_no_more():
    assert 0.7 < least_mu(*attacked(1000)) <= 1.0


@pytest.mark.proof
@pytest.mark.parametrize("fault", ["half the noise", "no noise", "no clip"])
def test_the_attack_finds_broken_variants(fault, monkeypatch):
    noisy = PrivateSteps.noisy
    if fault == "half the noise":
        monkeypatch.setattr(PrivateSteps, "noisy", lambda self, x, step: (noisy(self, 2 * x, step)) / 2)
    elif fault == "no noise":
        monkeypatch.setattr(PrivateSteps, "noisy", lambda self, x, step: x + 1e-3 * (noisy(self, x, step) - x))
    else:
        monkeypatch.setattr(private, "factors", lambda squared, c: torch.ones_like(squared))
    assert least_mu(*attacked(500)) > 1.2


# --- runs -------------------------------------------------------------------------------------------------------------
PRIVACY = {"mechanism": "dp_sgd", "unit": "record", "noise_multiplier": 1.0, "clip_norm": 1.0, "delta": 1e-5}


def tables(folder, name="fedavg", **changes):
    method = {"name": name, "rounds": 2, "fraction": 1.0} | changes.pop("method", {})
    return experiment(folder, method=method, privacy=PRIVACY, **changes)


@pytest.mark.parametrize(
    "name", ["fedavg", "fedprox", "fedavgm", "fedadam", "fedyogi", "scaffold", "fedawa", "ldawa", "local", "fedbip"]
)
def test_methods_that_use_rows_by_their_optimiser_only_run(name, tmp_path):
    found = fedfm.run(tables(tmp_path, name), tmp_path / "run")
    assert found["excluded"] == []
    assert 0 < found["epsilon"] < 50
    assert found["details"].get("train_loss") is None


@pytest.mark.parametrize(
    "name", ["fedncm", "fedpft", "fedper", "fedala", "fedamp", "ccvr", "ditto", "centralised", "dsfl"]
)
def test_methods_that_read_rows_in_another_way_are_refused(name, tmp_path):
    with pytest.raises(InputError):
        fedfm.run({**tables(tmp_path), "method": {"name": name}}, tmp_path / "run")


@pytest.mark.proof
def test_the_runs_epsilon_is_that_of_the_client_that_spends_most(tmp_path):
    found = fedfm.run(tables(tmp_path), tmp_path / "run")
    split = json.loads((tmp_path / "run/private/data.json").read_text())["split"]
    sizes = [c["train"]["rows"] for c in split["clients"].values()]
    expected = max(composed(1.0, min(16 / n, 1.0), 2 * math.ceil(n / 16), 1e-5) for n in sizes)
    assert found["epsilon"] == pytest.approx(expected, rel=2e-3)
    for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines():
        assert json.loads(line)["train_loss"] is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unit": "client"}, "dp_sgd protects"),
        ({"clip_norm": None}, "clip_norm is missing"),
        ({"halt_at_epsilon": 3.0}, "halt_at_epsilon"),
        ({"target_epsilon": 1.0}, "both are given"),
    ],
)
def test_contradictions_are_refused(change, message, tmp_path):
    privacy = {key: value for key, value in (PRIVACY | change).items() if value is not None}
    with pytest.raises(InputError, match=message):
        fedfm.run({**tables(tmp_path), "privacy": privacy}, tmp_path / "run")


def prepared(tables, out, **run):
    """A run that has not begun, whose clients have their secrets already."""
    Run.create(Experiment.from_dict({**tables, "run": tables["run"] | run}), out)
    for k in range(5):
        folder = out / f"private/memory/client-{k:02}"
        folder.mkdir(parents=True, mode=0o700)
        (folder / "dp_sgd.secret").write_bytes(storage.seal(bytes([k]) * 32))
        file_integrity.write_list(file_integrity.list_of(folder.parent, folder.name), {"dp_sgd.secret"})
    return out


def test_a_killed_run_spends_once_and_ends_in_the_same_bits(tmp_path, monkeypatch):
    straight = fedfm.resume(prepared(tables(tmp_path), tmp_path / "straight"))
    other = fedfm.run(tables(tmp_path), tmp_path / "other")
    assert other["params_sha256"] != straight["params_sha256"]  # of other secrets
    train, calls, outputs = private.train, [], {}

    def dying(jobs):
        calls.append(jobs)
        if len(calls) == 8:  # in round 2: three clients have answered
            raise KeyboardInterrupt
        trained = train(jobs)
        for job, w in zip(jobs, trained, strict=True):
            outputs.setdefault((job.client.id, job.client.memory[MEMORY]["place"]), set()).add(w.sha256())
        return trained

    monkeypatch.setattr(private, "train", dying)
    with pytest.raises(KeyboardInterrupt):
        fedfm.resume(prepared(tables(tmp_path), tmp_path / "broken"))
    resumed = fedfm.resume(tmp_path / "broken")
    assert len(calls) == 13  # two clients of round 2 trained twice
    assert all(len(found) == 1 for found in outputs.values())
    assert len(outputs) == 10
    for key in ("params_sha256", "epsilon", "accuracy", "rounds"):
        assert resumed[key] == straight[key], key
    ledger = fedfm.load_run(tmp_path / "broken").manifest["ledger"]
    assert [entry["mechanism"] for entry in ledger["entries"]] == ["DP-SGD"]


@pytest.mark.proof
def test_sums_of_private_updates_can_be_hidden_too(tmp_path):
    method = {"rounds": 1}  # a second one starts from sums that secure aggregation has rounded, with noise of its own
    shown = fedfm.resume(prepared(tables(tmp_path, method=method), tmp_path / "shown"))
    privacy = PRIVACY | {"aggregator": "secagg"}
    hidden = fedfm.resume(prepared({**tables(tmp_path, method=method), "privacy": privacy}, tmp_path / "hidden"))
    assert hidden["epsilon"] == shown["epsilon"]
    assert hidden["accuracy"] == pytest.approx(shown["accuracy"], abs=0.03)


@pytest.mark.release
@pytest.mark.simulation
def test_same_bits_as_local_on_flowers_simulation(tmp_path):
    local = fedfm.resume(prepared(tables(tmp_path), tmp_path / "local"))
    out = prepared(tables(tmp_path), tmp_path / "simulation", engine="simulation")
    done = subprocess.run([sys.executable, "-m", "fedfm", "resume", out, "--format", "json"], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    flower = fedfm.load_run(out).manifest["result"]
    for key in ("params_sha256", "epsilon", "accuracy"):
        assert flower[key] == local[key], key
