"""Encrypted inference: model owner and key holder, their messages, worker processes, and cost."""
