"""Extraction of a foundation model from mixed models: by hand, against naive algebra, and on random lines."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfm.audits.inference import extraction as e

# Two rounds by hand, psi = 1: w_0 = (5, 0), clients' models (6, 4) and (2, 4) of 1 and 3 rows, then (1, 3) and (5, 3).
W_PRE = np.array([-3.0, 6.0])
U = np.array([[3.0, 4.0], [4.0, 3.0]])
V = np.array([[0.0, 5.0], [1.0, 30 / 7]])
SEEDS = st.integers(0, 10_000)


def mixed(rng, rounds, size, a, spread=1.0):
    """(w_pre, u, v) of rounds that follow each other; ``a`` (T,), (T, P) or a function of the round."""
    w_pre, w, u, v = rng.normal(size=size), rng.normal(size=size), [], []
    for t in range(rounds):
        u.append(w + spread * rng.normal(size=size))
        w = (u[-1] + a[t] * w_pre) / (1 + a[t])
        v.append(w)
    return w_pre, np.array(u), np.array(v)


def test_two_rounds_equal_the_hand_computed_extraction():
    assert e.intersection(U, V) == pytest.approx(W_PRE, abs=1e-12)


def test_one_round_equals_the_hand_computed_interval():
    low, high = e.place(1.0, 2.0)  # psi tau_t / tau_0 = 1
    assert (low, high) == (1.5, 2.0)
    everyone = e.one_round(U[0], V[0], low, high)
    assert everyone == pytest.approx([-15 / 7, 40 / 7])
    assert np.linalg.norm(everyone - W_PRE) == pytest.approx(np.linalg.norm(W_PRE - U[0]) / 7)
    alone = e.one_round(np.array([2.0, 4.0]), V[0], low, high)  # client 2 takes its own model for the mean
    assert alone == pytest.approx([-10 / 7, 40 / 7])
    assert e.relative_error(alone, W_PRE) == pytest.approx(5**1.5 / 7 / np.linalg.norm(W_PRE))
    assert e.relative_error(alone, W_PRE) == pytest.approx(0.2381, abs=5e-5)


@given(SEEDS, st.integers(2, 6), st.integers(2, 50))
@settings(max_examples=60, deadline=None)
def test_lines_intersect_in_w_pre_for_any_alpha(seed, rounds, size):
    rng = np.random.default_rng(seed)
    w_pre, u, v = mixed(rng, rounds, size, rng.uniform(0.1, 2, rounds))
    try:
        met = e.intersection(u, v)
    except e.NoIntersectionError:
        return  # nearly parallel by chance, which happens in two dimensions only
    d = v - u
    condition = np.linalg.cond((d @ d.T) * (np.eye(rounds) - 1 / rounds))
    assert e.relative_error(met, w_pre) < 1e-9 * max(1.0, condition / 1e4)


@given(SEEDS)
@settings(max_examples=30, deadline=None)
def test_the_intersection_of_noisy_lines_is_their_least_squares_point(seed):
    rng = np.random.default_rng(seed)
    rounds, size = 4, 7
    _, u, v = mixed(rng, rounds, size, rng.uniform(0.5, 2, rounds))
    v = v + 0.1 * rng.normal(size=v.shape)
    # x - c_t d_t = u_t as one system in (x, c).
    matrix, right = np.zeros((rounds * size, size + rounds)), u.reshape(-1)
    for t in range(rounds):
        matrix[t * size : (t + 1) * size, :size] = np.eye(size)
        matrix[t * size : (t + 1) * size, size + t] = -(v - u)[t]
    naive = np.linalg.lstsq(matrix, right, rcond=None)[0]
    assert e.intersection(u, v) == pytest.approx(naive[:size], abs=1e-8)


@given(SEEDS, st.floats(0.01, 100))
@settings(max_examples=30, deadline=None)
def test_rotation_shift_scale_and_order_commute_with_the_intersection(seed, scale):
    rng = np.random.default_rng(seed)
    w_pre, u, v = mixed(rng, 3, 8, rng.uniform(0.5, 2, 3))
    turn, shift = np.linalg.qr(rng.normal(size=(8, 8)))[0], rng.normal(size=8)
    there = e.intersection(scale * u @ turn + shift, scale * v @ turn + shift)
    assert there == pytest.approx(scale * w_pre @ turn + shift, rel=1e-6, abs=1e-6 * scale)
    order = rng.permutation(3)
    assert e.intersection(u[order], v[order]) == pytest.approx(w_pre, abs=1e-8)


@pytest.mark.parametrize(("dtype", "bound"), [("f8", 1e-12), ("f4", 1e-5), ("f2", 2e-2)])
def test_the_error_is_only_the_rounding_of_the_messages(dtype, bound):
    rng = np.random.default_rng(0)
    w_pre, u, v = mixed(rng, 2, 5000, [1.5, 0.8])
    assert e.relative_error(e.intersection(u.astype(dtype), v.astype(dtype)), w_pre) < bound


def test_rounds_without_mixing_are_left_out():
    rng = np.random.default_rng(1)
    w_pre, u, v = mixed(rng, 4, 30, [1.0, 0.0, 1.5, 0.0])
    assert e.intersection(u, v) == pytest.approx(w_pre, abs=1e-9)


def test_lines_without_an_intersection_are_refused():
    with pytest.raises(e.NoIntersectionError, match="1 line; at least two"):
        e.intersection(U[:1], V[:1])
    with pytest.raises(e.NoIntersectionError, match="0 lines"):
        e.intersection(U, U)
    d = np.array([1.0, 2.0])
    with pytest.raises(e.NoIntersectionError, match="parallel"):
        e.intersection(np.array([[0.0, 0.0], [1.0, 0.0]]), np.array([d, d + np.array([1.0, 0.0])]))


def groups_of(*sizes):
    ends = np.cumsum(sizes)
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def test_a_scalar_for_each_tensor_is_fitted():
    rng = np.random.default_rng(2)
    groups, rounds = groups_of(40, 3, 1, 60), 3
    guess = np.array([1.0, 0.7, 0.5])
    a = np.concatenate(
        [np.repeat(guess[:, None] * rng.uniform(1, 2, (rounds, 1)), g.stop - g.start, 1) for g in groups], 1
    )
    w_pre, u, v = mixed(rng, rounds, 104, a)
    low, high = e.place(guess, 2 * guess)
    x, met = e.tensorwise(u, v, groups, low, high)
    assert met == 3
    for g in (groups[0], groups[1], groups[3]):
        assert x[g] == pytest.approx(w_pre[g], abs=1e-8)
    assert np.isfinite(x).all()
    # One scalar a round cannot fit them.
    assert e.relative_error(e.intersection(u, v), w_pre) > 1e-3


def test_fitted_scalars_of_tensors_stay_in_their_range():
    """Parallel but for rounding, free scalars run away; the range of a_t holds them."""
    rng = np.random.default_rng(3)
    w_pre, u, v = mixed(rng, 3, 20, [1.5, 1.2, 0.9], spread=1e-7)
    u, v = u.astype("f4"), v.astype("f4")
    low, high = e.place(np.array([1.0, 0.8, 0.6]), np.array([2.0, 1.6, 1.2]))
    x, _ = e.tensorwise(u, v, [slice(None)], low, high)
    nearest = np.linalg.norm(v[-1] - w_pre) * (high[-1] - 1)  # of the last line, between the ends of the range
    assert np.linalg.norm(x - w_pre) <= nearest


def test_tensors_mixed_at_least_twice_are_found():
    rng = np.random.default_rng(4)
    groups = groups_of(30, 30, 30)
    on = np.array([[1, 1, 0], [0, 1, 0], [1, 0, 0], [1, 1, 0]])
    a = np.repeat(on * rng.uniform(0.5, 1.5, (4, 1)), 30, 1)
    w_pre, u, v = mixed(rng, 4, 90, a)
    met = e.intersection(u, v, groups)
    assert met[:60] == pytest.approx(w_pre[:60], abs=1e-9)  # mixed twice or more
    assert met[60:] == pytest.approx(v[:, 60:].mean(0))  # never mixed: nothing is known


def test_a_tensor_mixed_once_is_found_through_the_others():
    rng = np.random.default_rng(5)
    on = np.array([[1, 1], [1, 0]])
    a = np.repeat(on * np.array([[0.9], [1.4]]), 25, 1)
    w_pre, u, v = mixed(rng, 2, 50, a)
    assert e.intersection(u, v, groups_of(25, 25)) == pytest.approx(w_pre, abs=1e-9)


@given(SEEDS, st.sampled_from(["uniform", "log"]))
@settings(max_examples=20, deadline=None)
def test_every_interval_contains_its_coordinate(seed, prior):
    rng = np.random.default_rng(seed)
    guess = np.array([1.0, 0.8, 0.6])
    ratio = (0.02, 2.0) if prior == "log" else (1.0, 2.0)
    a = guess[:, None] * rng.uniform(*ratio, (3, 40))
    w_pre, u, v = mixed(rng, 3, 40, a)
    low, high = e.place(ratio[0] * guess, ratio[1] * guess)
    x = e.coordinatewise(u, v, low, high, prior)
    for i in range(40):
        ends = [sorted((u[t, i] + k * (v[t, i] - u[t, i])) for k in (low[t], high[t])) for t in range(3)]
        least, most = max(a for a, _ in ends), min(b for _, b in ends)
        assert least - 1e-9 <= w_pre[i] <= most + 1e-9
        assert least - 1e-9 <= x[i] <= most + 1e-9


def test_intervals_shrink_with_every_round():
    rng = np.random.default_rng(6)
    guess = 0.9 ** np.arange(10)
    w_pre, u, v = mixed(rng, 10, 2000, guess[:, None] * rng.uniform(1, 2, (10, 2000)))
    low, high = e.place(guess, 2 * guess)
    error = [e.relative_error(e.coordinatewise(u[:t], v[:t], low[:t], high[:t]), w_pre) for t in (1, 3, 10)]
    assert error[0] > 3 * error[1] > 9 * error[2] > 0
    assert error[2] < 0.01


def test_a_coordinate_that_never_moved_keeps_its_value():
    u = np.array([[1.0, 2.0], [1.0, 3.0]])
    v = np.array([[1.0, 3.0], [1.0, 3.5]])
    assert e.coordinatewise(u, v, np.array([1.5, 1.5]), np.array([2.0, 2.0]))[0] == pytest.approx(1.0)


@given(SEEDS, st.floats(0.05, 3))
@settings(max_examples=40, deadline=None)
def test_the_error_of_one_line_is_within_its_bound(seed, guess):
    """rho/(4 + 3 rho) |w_pre - u| with rho = tau_0 / (psi tau_t) = 1/l: 1/7 where rho = 1."""
    rng = np.random.default_rng(seed)
    w_pre, u, v = mixed(rng, 1, 20, [guess * rng.uniform(1, 2)])
    x = e.one_round(u[0], v[0], *e.place(guess, 2 * guess))
    rho = 1 / guess
    assert np.linalg.norm(x - w_pre) <= (rho / (4 + 3 * rho) + 1e-9) * np.linalg.norm(w_pre - u[0])


def naive_alternating(u, v, l):  # noqa: E741 - the symbol of the specification
    a, drawn = 1.5 * l, v - u
    for _ in range(200):
        p = (a[:, None] * (drawn + a[:, None] * v)).sum(0) / (a**2).sum()
        a = np.array(
            [np.clip(drawn[t] @ (p - v[t]) / ((p - v[t]) ** 2).sum(), 0.8 * l[t], 2.4 * l[t]) for t in range(len(u))]
        )
    return (a[:, None] * (drawn + a[:, None] * v)).sum(0) / (a**2).sum()


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_the_alternating_estimate_equals_its_formula(rounds):
    rng = np.random.default_rng(rounds)
    guess = 0.9 ** np.arange(rounds)
    w_pre, u, v = mixed(rng, rounds, 300, guess * rng.uniform(1, 2, rounds))
    u = u + 0.2 * rng.normal(size=u.shape)
    x = e.alternating(u, v, guess)
    assert x == pytest.approx(naive_alternating(u, v, guess), rel=1e-5, abs=1e-7)
    assert e.relative_error(x, w_pre) < 0.5


def test_more_colluding_clients_give_a_better_estimate():
    rng = np.random.default_rng(7)
    guess = np.array([1.0, 0.8])
    w_pre, u, v = mixed(rng, 2, 4000, guess * [1.3, 1.7])
    noise = rng.normal(size=(2, 10, 4000))  # of ten clients
    noise -= noise.mean(1, keepdims=True)  # together they know w'
    errors = [e.relative_error(e.alternating(u + noise[:, :k].mean(1), v, guess), w_pre) for k in (1, 2, 5, 10)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.01 < errors[0]


def test_a_run_without_mixing_gives_no_estimate():
    with pytest.raises(e.NoIntersectionError, match="no round"):
        e.alternating(U, V, np.zeros(2))


@pytest.mark.parametrize("share", [0.05, 0.1, 0.5, 1.0])
def test_an_active_client_reverses_the_direction_of_the_mean(share):
    """The others send w_t back: w' = -0.3 w_t, whose direction is the opposite one."""
    w = np.random.default_rng(9).normal(size=20)
    w_new = share * e.turned_around(w, share) + (1 - share) * w
    assert w_new == pytest.approx(-0.3 * w)
    chord = w_new / np.linalg.norm(w_new) - w / np.linalg.norm(w)
    assert np.linalg.norm(chord) == pytest.approx(2.0)  # there is no larger one


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5, float("nan")])
def test_shares_of_the_change_are_validated(share):
    with pytest.raises(ValueError, match="share"):
        e.turned_around(np.ones(2), share)


def test_tiny_entries_dominate_dist():
    truth = np.array([1.0, 1.0, 1.0])
    assert e.dist(np.array([2.0, 0.5, 0.0]), truth) == pytest.approx((0.5 + 1.0) / 2)
    close = np.array([1.0, 1.0, 1e-3])
    assert e.relative_error(close, truth) < 0.6
    assert e.dist(close, truth) > 300


def test_the_error_of_a_zero_model():
    assert e.relative_error(np.zeros(2), np.zeros(2)) == 0.0
    assert e.relative_error(np.ones(2), np.zeros(2)) == float("inf")
