"""Noise of the last model under client-level privacy at equal epsilon: the table of docs/how-to/client-privacy.md.

python benchmarks/client_noise.py

Standard deviation of an entry of the model after all rounds, times the expected cohort over clip_norm, if the method
adds up the means (fedavg). Four ways to choose a cohort of one client in b: the first account of all clients in every
round, a rotation with independent noise, secret coins, a rotation with correlated noise. Some seconds on one core.
"""

from __future__ import annotations

import math

from fedfm.privacy.composition import noise_multiplier_for
from fedfm.privacy.correlated import Strategy, strategy

DELTA = 1e-5
RUNS = ((20, 2), (50, 5), (50, 10), (100, 10), (200, 20))  # rounds, b
EPSILONS = (1.0, 4.0, 8.0)


def main() -> None:
    """Print the table."""
    print("| rounds | fraction | epsilon | everybody | rotation | coins | correlated | bands |")
    print("|---|---|---|---|---|---|---|---|")
    for rounds, period in RUNS:
        best, plain = strategy(rounds, period), Strategy((1.0,), rounds, period)
        for epsilon in EPSILONS:
            one = noise_multiplier_for(epsilon, DELTA)
            coins = math.sqrt(rounds) * noise_multiplier_for(epsilon, DELTA, rounds, 1 / period)
            noises = " | ".join(f"{x:.1f}" for x in (one * rounds, one * plain.last(), coins, one * best.last()))
            print(f"| {rounds} | 1/{period} | {epsilon:g} | {noises} | {len(best.coefficients)} |")


if __name__ == "__main__":
    main()
