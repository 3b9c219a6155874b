"""BlindFed (arXiv:2502.01289): the owner computes on encrypted rows, the holder of the rows sees no weights."""
