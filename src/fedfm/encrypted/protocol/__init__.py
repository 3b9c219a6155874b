"""The rounds of a run on encrypted rows: server, client, masked and permuted protocols, in the clear or under CKKS."""
