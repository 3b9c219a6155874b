"""The encrypted package: BlindFed (arXiv:2502.01289). The server computes on encrypted rows; clients see no weights.

There are five layers, and each imports only the layers named before it: ``ckks`` (ring, ciphertexts, SEAL, refresh),
``student`` (a model whose functions are polynomials, and its distillation), ``inference`` (model owner, key holder,
workers, cost), ``protocol`` (server and client of a run), ``audits``. ``blindfed.py`` is the paper's method. The
packages that every run needs do not import this one. They find the method, audits, commands and student of this package
by name; see docs/architecture.md.
"""
