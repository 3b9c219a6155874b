"""FedMS, with its gate and the rule that unfreezes layers."""
