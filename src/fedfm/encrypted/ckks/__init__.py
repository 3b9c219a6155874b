"""CKKS: the ring, ciphertexts, SEAL, products of matrices, a transformer block, refresh by the key holder."""
