"""The encrypted wing: BlindFed (arXiv:2502.01289). The server computes on encrypted rows; clients see no weights.

There are five layers, and each imports only those named before it: ``ckks`` (ring, ciphertexts, SEAL, refresh),
``student`` (a model whose functions are polynomials, and its distillation), ``inference`` (model owner, key holder,
workers, cost), ``protocol`` (server and client of a run), ``audits``. ``blindfed.py`` is the paper's method. The trunk
does not import this package. It finds the method, the audits, the commands and the student through its sockets
(docs/architecture.md).
"""
