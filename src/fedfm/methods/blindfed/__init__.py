"""BlindFed (arXiv:2507.05223): the owner computes on encrypted rows, the holder of the rows sees no weights."""
