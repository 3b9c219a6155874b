"""Bounds of settings: what passes, what the message says, and that every default of fedfm lies within its own."""

import dataclasses
import math
import typing
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedfm.api.pretrain_spec import PretrainSpec
from fedfm.attacks.backdoor import Backdoor
from fedfm.config.registry import ours, resolve
from fedfm.config.run_spec import RunSpec
from fedfm.core.fields import bounds_of, check, is_required, setting, settings_of
from fedfm.data.spec import DataSpec, PartitionSpec
from fedfm.errors import InputError
from fedfm.methods.fedavg import FedAvg
from fedfm.methods.fedbaf.fedbaf import FedBaF
from fedfm.methods.fedprox import FedProx
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.privacy.spec import PrivacySpec
from fedfm.sites.silo_config import Silo
from fedfm.training import SGD
from fedfm.training.fit_head import HeadSpec

SPECS = [DataSpec, PartitionSpec, ModelSpec, AdaptationSpec, PrivacySpec, RunSpec, PretrainSpec, Silo, HeadSpec]
NAMED = [resolve(k, n) for k in ("methods", "optimisers", "attacks", "aggregation") for n in ours(k)]


@dataclass(frozen=True)
class Inner:
    depth: int = setting(1, "how deep", ge=1)


@dataclass(frozen=True)
class Table:
    name: str = setting("a", "which", choices=("a", "bb"))
    share: float = setting(0.5, "a share", gt=0, le=1)
    count: int = setting(3, "a number", ge=1, le=9)
    pull: float = setting(0.0, "a pull", ge=0, finite=True)
    turn: float = setting(2.0, "a factor", finite=True, but=(0.0, 1.0))
    low: float = setting(0.0, "below", lt=1)
    ranks: tuple[int, ...] = setting((), "ranks", ge=1)
    parts: dict[str, float] = setting(dict, "parts", gt=0, keys="[a-z]+")
    word: str = setting("x", "a word", pattern=r"\w+", words="letters")
    maker: str = setting("", "who", required=True)
    only: int | None = setting(None, "of bb", of=("bb",), required=True, ge=1)
    lambda_: float = setting(0.1, "Python keeps its name", ge=0)
    inner: Inner = setting(Inner(), "a table")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"name": "b"}, 't.name = "b": expected "a" or "bb" (did you mean "bb"?)'),
        ({"share": 0.0}, "t.share = 0.0: expected a number in (0, 1]"),
        ({"share": math.nan}, "t.share = nan: expected a number in (0, 1]"),
        ({"share": "0.5"}, 't.share = "0.5": expected a number in (0, 1]'),
        ({"share": True}, "t.share = true: expected a number in (0, 1]"),
        ({"count": 10}, "t.count = 10: expected a whole number from 1 to 9"),
        ({"pull": math.inf}, "t.pull = inf: expected a finite number of at least 0"),
        ({"pull": -1}, "t.pull = -1: expected a finite number of at least 0"),
        ({"turn": 1}, "t.turn = 1: expected a finite number other than 0 and 1"),
        ({"low": 1.0}, "t.low = 1.0: expected a number below 1"),
        ({"ranks": (2, 0)}, "t.ranks[1] = 0: expected a whole number of at least 1"),
        ({"parts": {"a": 0.0}}, "t.parts.a = 0.0: expected a number above 0"),
        ({"parts": {"A": 1.0}}, "t.parts = {'A': 1.0}: expected a number above 0"),
        ({"word": "two words"}, 't.word = "two words": expected letters'),
        ({"maker": ""}, "t.maker is missing: expected a text in quotes"),
        ({"only": 2}, 't.only belongs to "bb", not to "a"'),
        ({"name": "bb"}, 't.only is required by "bb": expected a whole number of at least 1'),
        ({"lambda_": -0.5}, "t.lambda = -0.5: expected a number of at least 0"),
        ({"inner": Inner(0)}, "t.inner.depth = 0: expected a whole number of at least 1"),
    ],
)
def test_a_value_out_of_bounds_is_refused_in_the_words_of_its_bounds(values, says):
    with pytest.raises(InputError) as caught:
        check(Table(**{"maker": "me"} | values), "t")
    assert str(caught.value).startswith(says)


def test_a_file_of_one_table_names_the_bare_key():
    with pytest.raises(InputError, match=r"^depth = 0"):
        check(Inner(0), "")


def test_values_within_their_bounds_pass():
    check(Table(maker="me", share=1, pull=np.float32(0.5), turn=-3, ranks=(1, 2), parts={"a": math.inf}), "t")
    check(Table(maker="me", name="bb", only=1), "t")


@given(st.floats() | st.integers(-3, 3), *[st.none() | st.integers(-2, 2)] * 4, st.booleans())
def test_a_number_passes_as_its_ends_say(x, gt, ge, lt, le, finite):
    made = dataclasses.make_dataclass("Made", [("x", float, setting(0.0, gt=gt, ge=ge, lt=lt, le=le, finite=finite))])
    ends = [end for end in (gt, ge, lt, le) if end is not None]
    right = [gt is None or x > gt, ge is None or x >= ge, lt is None or x < lt, le is None or x <= le]
    within = all(right) and (not finite or math.isfinite(x)) and not (ends and math.isnan(x))
    try:
        check(made(x), "made")
    except InputError:
        assert not within
    else:
        assert within


@pytest.mark.parametrize("cls", [*SPECS, *NAMED], ids=lambda c: f"{c.__module__}.{c.__name__}")
def test_every_default_lies_within_its_bounds(cls):
    made = cls()
    for key, f, hint in settings_of(cls):
        value, bounds = getattr(made, f.name), bounds_of(f)
        assert f.metadata["help"], f"{key} says what it is"
        for end in ("gt", "ge", "lt", "le", "finite", "but"):
            assert not getattr(bounds, end) or {int, float} & {hint, *leaves(hint)}, f"{key}: {end} of no number"
        assert not bounds.choices or str in {hint, *leaves(hint)}, f"{key}: choices of no text"
        if not is_required(f) and isinstance(value, (int, float, str)):
            assert bounds.admit(value), f"{key} = {value}"


def leaves(hint):
    return {hint}.union(*(leaves(inner) for inner in typing.get_args(hint)))


def test_a_field_with_a_default_out_of_bounds_is_required():
    required = {cls.__name__: [key for key, f, _ in settings_of(cls) if is_required(f)] for cls in (Backdoor, FedBaF)}
    assert required == {"Backdoor": ["fraction"], "FedBaF": ["foundation"]}


def test_a_users_class_needs_no_bounds():
    @dataclass(frozen=True)
    class Mine(FedAvg):
        eta: float = 1.0

    check(Mine(eta=-1.0), "method")
    with pytest.raises(InputError, match=r"method\.fraction = 2\.0"):
        check(Mine(fraction=2.0), "method")
    with pytest.raises(InputError, match=r"method\.local\.momentum = 1\.0"):
        check(Mine(local=SGD(momentum=1.0)), "method")


def test_an_unknown_bound_is_a_mistake_of_who_wrote_it():
    with pytest.raises(TypeError, match="smallest"):
        setting(1, "x", smallest=1)


def test_a_method_in_a_method_is_checked_under_its_own_key():
    with pytest.raises(InputError, match=r"^method\.base\.mu = -1\.0: expected a finite number of at least 0$"):
        check(FedBaF(foundation="x", base=FedProx(mu=-1.0)), "method")
