"""Server and client of a run on encrypted rows: masked and permuted protocols, in the clear or under CKKS."""
