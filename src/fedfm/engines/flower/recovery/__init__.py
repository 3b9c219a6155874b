"""Recovery of runs on Flower: lost messages, nodes that reconnect, a restarted server."""
