"""A method has ten members and its reports; its bases say its roles, and its traits what is true of it."""

import ast
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import pytest
import torch

import fedfm
from fedfm.config.experiment import Experiment
from fedfm.config.registry import ours, resolve
from fedfm.core.capabilities import ROLES, Comparable, Needs, Personal, Predictor, Reporter, Traits, has
from fedfm.core.client import ClientId, Update, on_client
from fedfm.core.method import Method
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.runtime.population import handles_parameters, populate
from small import experiment

SOURCE = Path(fedfm.__file__).parent


def test_a_method_has_few_members_besides_its_fields():
    found = {name for name in vars(Method) if not name.startswith("_")}
    data = {"needs", "traits", "means", "asks", "state_type", "paper"}
    assert found == data | {"init", "step", "params_for", "validate"}


METHODS = [resolve("methods", name)() for name in ours("methods")]


def test_the_class_of_the_state_is_the_one_that_the_base_names():
    @dataclass(frozen=True)
    class Moved:
        w: Params
        h: Params

    class Mine(Personal, Method[Moved]):
        """Says nothing of its state besides its base."""

    class Further(Mine):
        """Inherits it."""

    class Table(Method[dict[str, Params]]):
        """A state that is not a class."""

    S = TypeVar("S")

    class Open(Method[S]):
        """Leaves it to those who derive from it."""

    class Closed(Open[Moved]):
        """Does not."""

    class Stated(Method[Moved]):
        state_type: ClassVar[Any] = dict[str, Moved]

    found = [of.state_type for of in (Mine, Further, Table, Open, Closed, Stated)]
    assert found == [Moved, Moved, dict[str, Params], Params, Moved, dict[str, Moved]]


def members(role):
    return [name for name in vars(role) if not name.startswith("_")]


def test_each_role_names_its_caller_and_each_member_has_a_user():
    for role in (*ROLES, Reporter):
        assert "Caller: " in role.__doc__, role
        for name in members(role):
            own = (isinstance(m, role) and getattr(type(m), name) is not getattr(role, name) for m in METHODS)
            assert any(own), f"{role.__name__}.{name}"


def test_a_role_is_taken_for_what_it_is_for():
    for method in METHODS:
        for role in ROLES:
            optional = not getattr(role, "__abstractmethods__", None)
            if isinstance(method, role) and optional and role is not Personal:  # params_for may tell models apart
                assert any(has(method, role, name) for name in members(role)), (method, role)


def test_each_trait_is_explained_checked_and_has_a_user():
    for f in fields(Traits):
        assert f.metadata["help"], f.name
        assert any(getattr(m.traits, f.name) != f.default for m in VARIANTS), f.name
    for m in VARIANTS:
        assert set(m.traits.sealed_replies) <= set(m.asks)
        for f in fields(Traits):
            assert type(getattr(m.traits, f.name)) is type(f.default), (m, f.name)


VARIANTS = [
    *METHODS,
    resolve("methods", "fedpft")(counts="withheld"),
    resolve("methods", "blindfed")(predict=True, rounds=0),
]
CLAIMS = [f.name for f in fields(Traits) if f.metadata["claim"]]


@pytest.mark.parametrize("name", ours("methods"))
def test_no_subclass_inherits_a_claim_about_mathematics_that_it_may_have_changed(name):
    base = resolve("methods", name)

    class Mine(base):
        """Says nothing of its traits."""

    class Further(Mine):
        """Neither does this one."""

    class Again(Mine):
        traits: ClassVar[Traits] = Traits(**dict.fromkeys(CLAIMS, True))

    for cls in (Mine, Further):
        inherited = cls().traits
        assert [claim for claim in CLAIMS if getattr(inherited, claim)] == []
        assert inherited == replace(base().traits, **dict.fromkeys(CLAIMS, False))  # the rest is not a claim
    assert all(getattr(Again().traits, claim) for claim in CLAIMS)


def test_a_claim_that_depends_on_settings_is_not_inherited_either():
    class Switched(resolve("methods", "fedavg")):
        @property
        def traits(self):
            return Traits(rows_by_optimiser=self.fraction == 1, hides_counts=self.fraction == 1)

    class Mine(Switched):
        pass

    assert Switched().traits.rows_by_optimiser
    assert not Switched(fraction=0.5).traits.rows_by_optimiser
    assert Mine().traits == Traits(hides_counts=True)
    assert Mine(fraction=0.5).traits == Traits()


@pytest.mark.parametrize(("role", "member"), [(r, m) for r in ROLES for m in members(r)])
def test_a_member_of_a_role_that_nobody_would_call_is_refused(role, member):
    base = resolve("methods", "fedavg")
    for value in (lambda self, *arguments: None, property(lambda self: None)):
        with pytest.raises(InputError, match=rf"Mine.{member} is a member of the role {role.__name__}"):
            type("Mine", (base,), {member: value})
        with pytest.raises(InputError, match=rf"Mine.{member} is a member of the role {role.__name__}"):
            type("Mine", (type("Mixin", (), {member: value}), base), {})
        assert issubclass(type("Mine", (role, base), {member: value}), role)

    @on_client
    def message(self, client: fedfm.Client) -> int:
        return 0

    assert type("Mine", (base,), {member: message, "__annotations__": {}})  # a message may have the name
    assert type("Mine", (base,), {member: 3})  # and so may a setting


NAMES = [f.name for f in fields(Traits)]


@pytest.mark.parametrize("name", NAMES)
def test_a_trait_as_an_attribute_of_the_class_is_refused(name):
    base = resolve("methods", "fedavg")
    for value in (True, ("noise",), property(lambda self: True), lambda self: True):
        with pytest.raises(InputError, match=rf"Mine.{name}: nobody .* traits = Traits\({name}=\.\.\.\)"):
            type("Mine", (base,), {name: value})
        with pytest.raises(InputError, match=f"Mine.{name}: nobody"):
            type("Mine", (base,), {name: value, "__annotations__": {name: "ClassVar[bool]"}})
    with pytest.raises(InputError, match=f"Mine.{name}: nobody"):
        type("Mine", (type("Mixin", (), {name: True}), base), {})
    assert type("Mine", (base,), {name: 3, "__annotations__": {name: "int"}})  # a setting may have the name
    assert type("Mine", (base,), {})().traits == base().traits.without_claims()


def test_traits_are_traits():
    with pytest.raises(InputError, match=r"Mine.traits = .*: expected Traits\(\.\.\.\)"):
        type("Mine", (Method,), {"traits": {"rows_by_optimiser": True}})


def test_only_methods_with_the_trait_compute_with_parameters_alone(tmp_path):
    class Mine(resolve("methods", "fedavg")):
        """It may ask the model for outputs, whatever its base does."""

    def alone(method):
        return handles_parameters(replace(Experiment.from_dict(experiment(tmp_path)), method=method))

    assert alone(resolve("methods", "fedavg")())
    assert not alone(Mine())
    assert not alone(resolve("methods", "ensemble")())


def calls(tree):
    return (n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name))


def last_word(node):
    """The last word of a name: ``self.run.experiment.method`` -> ``method``."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@pytest.mark.proof
def test_nothing_of_a_method_is_asked_for_by_name():
    found = []
    for path in SOURCE.rglob("*.py"):
        for call in calls(ast.parse(path.read_text())):
            named = call.func.id in ("getattr", "hasattr") and isinstance(call.args[1], ast.Constant)
            if named and last_word(call.args[0]) in ("method", "base", "chosen", "local", "aggregation"):
                found.append(f"{path.relative_to(SOURCE)}:{call.lineno}")
    assert [f for f in found if not f.startswith(("training/packed/net.py", "core/method.py"))] == []


def test_only_methods_and_the_audits_of_them_know_a_method():
    for path in SOURCE.rglob("*.py"):
        if path.relative_to(SOURCE).parts[0] in ("methods", "audits"):  # an audit attacks one method's formula
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                assert not node.module.startswith("fedfm.methods"), f"{path}: {node.module}"


@pytest.mark.proof
def test_one_word_one_meaning():
    found = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


@dataclass(frozen=True)
class Votes(Personal, Predictor, Comparable, Method[dict[ClientId, Params]]):
    """The server keeps a head for each client, and a head says the same of every row."""

    needs: ClassVar[Needs] = Needs("head", ("head",))
    asks: ClassVar[tuple[str, ...]] = ("shift",)
    state_type: ClassVar = dict[ClientId, Params]
    traits: ClassVar[Traits] = Traits(server_secrets=("coin",))

    rounds: int = field(default=2)

    def init(self, fed):
        fed.secret("coin")
        return dict.fromkeys(fed.clients, fed.initial)

    def step(self, fed, state, t):
        updates = fed.ask(self.shift, t=t)
        return {c: state[c] + u.delta for c, u in updates.items()}

    @on_client
    def shift(self, client: fedfm.Client, t: int) -> Update:
        w = client.model.params()
        return Update(w.map(lambda flat: torch.full_like(flat, float(t))), 1.0, {})

    def params_for(self, state, client):
        return state[client]

    def start_models(self, state):
        return state

    def logits(self, model, w, rows):
        return torch.zeros(len(rows), len(model.classes)).index_fill_(1, torch.tensor([1]), float(w.norm() > 0))

    def details(self, state, judge):
        return {"norms": {c: round(w.norm(), 3) for c, w in state.items()}, "judged": judge is not None}

    def notices(self, state):
        return [f"{len(state)} votes"]

    def arrays(self, state):
        return {"lengths": np.array([w.norm() for w in state.values()])}

    def baselines(self):
        return {}

    @property
    def feature_transform(self):
        return "nothing at all"


def test_a_method_of_several_roles_is_asked_for_each(tmp_path):
    method = Votes()
    tables = experiment(tmp_path)
    tables["method"] = method
    told = []

    class Watch(fedfm.Progress):
        def notice(self, text):
            told.append(text)

    result = fedfm.run(Experiment(**tables), tmp_path / "run", progress=Watch())
    run = fedfm.load_run(tmp_path / "run")
    clients, state = run.manifest["clients"], run.state(method.state_type)
    assert result["details"]["norms"] == {c: round(state[c].norm(), 3) for c in clients}
    grown = 3.0 * sum(state[clients[0]].layout.sizes.values()) ** 0.5  # 1 and 2 were added to every entry
    assert state[clients[0]].norm() == pytest.approx(grown, rel=0.3)
    assert result["details"]["judged"] is True
    assert {p.name for p in (tmp_path / "run" / "private" / "server").glob("*.secret")} == {"coin.secret"}
    assert f"{len(clients)} votes" in told
    assert np.load(tmp_path / "run" / "lengths.npz")["lengths"].shape == (2, len(clients))
    assert set(result["details"]["server_client_accuracy"]) == set(clients)
    assert (tmp_path / "run" / "clients" / clients[0] / "adapter").is_dir()
    assert "nothing at all" in (tmp_path / "run" / "clients" / clients[0] / "adapter" / "fedfm.json").read_text()
    labels = populate(run.experiment).test.labels  # every row is said to be of class 1
    assert result["global_accuracy"] == pytest.approx(float((labels == 1).float().mean()))
