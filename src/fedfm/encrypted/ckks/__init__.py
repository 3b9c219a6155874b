"""CKKS: the ring, ciphertexts, SEAL, matrix products, a transformer block, refresh by the key holder."""
