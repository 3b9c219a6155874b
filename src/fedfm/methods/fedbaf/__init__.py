"""FedBaF: the server pulls each aggregate towards a foundation model that only the server has."""
