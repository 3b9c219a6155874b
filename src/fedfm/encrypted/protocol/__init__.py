"""Server and client of a run on encrypted rows: the masked and the permuted protocol, in the clear or under CKKS."""
