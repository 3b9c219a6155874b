"""FedBaF: a foundation model that only the server has, its matching, and its pull."""
