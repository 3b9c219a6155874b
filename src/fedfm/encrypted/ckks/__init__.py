"""CKKS: the ring, ciphertexts, SEAL, matrix products, a transformer block, and refresh by the key holder."""
