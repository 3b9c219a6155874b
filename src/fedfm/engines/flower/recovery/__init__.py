"""Recover runs on Flower from lost messages, nodes that reconnect, and a restarted server."""
