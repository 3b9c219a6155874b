"""docs/explanation/methods.md: each file and function that it names exists, and what its formulas say is computed."""

import ast
import math
import re
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import norm

from fedfm.encrypted.student.polynomials import Exponential, Inverse, Quadratic
from fedfm.linalg.params import Params
from fedfm.methods.fedbaf.pull import Piece, direction_distance
from fedfm.methods.fedbaf.pull import mix as pull
from fedfm.methods.fedbip.fedbip import shares
from fedfm.methods.fedms.activation import next_k
from fedfm.methods.fedms.mixture import mix
from fedfm.methods.fedpft.encoding import formula_numbers
from fedfm.models.adapters.side_adapter import SideAdapter
from fedfm.privacy.gaussian import delta_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "methods.md"
ROWS = re.findall(r"^\| (.+) \| \[(.+)\]\((\S+)\) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.M)


def definitions(path):
    """Functions and classes of a module, methods as Class.method."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef))


def test_every_method_has_rows():
    assert len(ROWS) == PAGE.read_text(encoding="utf-8").count("../../src/") >= 20


@pytest.mark.parametrize(("what", "name", "target", "functions"), ROWS)
def test_each_file_and_function_exists(what, name, target, functions):
    path = (PAGE.parent / target).resolve()
    assert path.name == name
    assert set(re.findall(r"`(\S+)`", functions)) <= set(definitions(path))


@pytest.mark.parametrize(
    ("covariance", "numbers"),
    [("full", lambda d: 2 * d + (d * d - d) // 2 + 1), ("diag", lambda d: 2 * d + 1), ("spherical", lambda d: d + 2)],
)
def test_sizes_of_mixtures(covariance, numbers):
    assert formula_numbers(covariance, 7, 3) == 3 * numbers(7)


def test_the_delta_of_gaussian_noise_follows_the_formula():
    sigma, sensitivity, epsilon = 1.7, 0.9, 0.8
    a, b = sensitivity / (2 * sigma), epsilon * sigma / sensitivity
    expected = norm.cdf(a - b) - math.exp(epsilon) * norm.cdf(-a - b)
    assert delta_of(sigma, sensitivity, epsilon) == pytest.approx(expected)


def test_weights_of_task_vectors():
    g = np.array([[[1.0, 0.5], [0.5, 1.0]]])
    found = shares(g, np.ones_like(g), "raw")
    np.testing.assert_allclose(found, g / g.sum(2, keepdims=True))


def test_mixture_of_experts_and_a_layer_more():
    found = mix(torch.tensor([0.25]), torch.tensor([[0.3, 0.1]]), torch.tensor([[0.2, 0.4]]))
    torch.testing.assert_close(found, torch.tensor([[0.225, 0.325]]))
    assert next_k(deque([0.5, 0.6], maxlen=2), 0.56, 1, 0.02, 4) == 2
    assert next_k(deque([0.5, 0.6], maxlen=2), 0.58, 1, 0.02, 4) == 1


def test_adapters_of_two_blocks():
    made = SideAdapter(2, 1, 2, 1, 2)
    with torch.no_grad():
        made.down.copy_(torch.tensor([[[1.0, 1.0]], [[1.0, -1.0]]]))
        made.up.copy_(torch.tensor([[[1.0], [0.0]], [[0.0], [1.0]]]))
        made.alpha.fill_(1.0)
        h = made.last_states(torch.tensor([[[[1.0, 0.0]], [[0.0, 1.0]]]]))[0, 0]
    torch.testing.assert_close(h, torch.tensor([1.9544997, 0.9780755]))


def test_exponential_and_gelu():
    x = torch.tensor([-1.0, 0.3, 0.9], dtype=torch.float64)
    expected = sum(x**i / math.factorial(i) for i in range(7))
    torch.testing.assert_close(Exponential(6, 0).evaluate(x), expected)
    expected = sum((x / 4) ** i / math.factorial(i) for i in range(5)) ** 4
    torch.testing.assert_close(Exponential(4, 2).evaluate(x), expected)
    torch.testing.assert_close(Quadratic(0.125, 0.25, 0.5).evaluate(x), 0.125 * x**2 + 0.25 * x + 0.5)


def test_inverse():
    x = torch.tensor([0.5, 1.5], dtype=torch.float64)
    a, b = 2 - x, 1 - x
    for _ in range(3):
        b = b * b
        a = a * (1 + b)
    torch.testing.assert_close(Inverse(3, scale=1.0).evaluate(x), a)


def test_distance_and_pull():
    w_t, w = (Params({"w": torch.tensor(v)}) for v in ([5.0, 0.0], [3.0, 4.0]))
    assert direction_distance(w, w_t) == pytest.approx(math.sqrt(0.8))  # by hand
    w_pre = {"w": Piece((2,), torch.tensor([-3.0, 6.0]))}
    torch.testing.assert_close(pull(w, w_pre, 0.75)["w"], torch.tensor([0.75 / 1.75, 8.5 / 1.75]))
