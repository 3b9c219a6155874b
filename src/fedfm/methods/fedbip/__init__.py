"""FedBip (arXiv:2509.12697), with its task vectors."""
