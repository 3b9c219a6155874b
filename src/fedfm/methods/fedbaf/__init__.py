"""FedBaF, with the foundation model that the server keeps, its matching and its pull."""
