"""FedMS, with its gate and its queue of capabilities."""
