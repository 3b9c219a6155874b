"""FedPFT (arXiv:2402.01862), with its Gaussian mixtures and its private releases."""
