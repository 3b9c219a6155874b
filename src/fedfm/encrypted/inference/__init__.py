"""Encrypted inference: the model owner and the key holder, their messages, worker processes, cost."""
