"""The wire format: a value as a head and one block of bytes, and as Flower's records. No pickle."""
