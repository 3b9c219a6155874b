"""Differential privacy of what a client releases once.

- ``gaussian``: how much noise (Balle & Wang 2018), and what FedPFT's printed noise is worth
- ``noise``: normals from a secret key
- ``plan``: the public half of a release: neighbours, statistics, sensitivity, noise
- ``moments``: noisy statistics of one class at one client, and the normal distribution that they describe
- ``em``: several components a class, every iteration accounted
- ``sums``: one noisy sum over the federation
- ``ledger``: what was spent
"""
