"""What a run on Flower survives: lost messages, nodes that come back, a server that is started again."""
