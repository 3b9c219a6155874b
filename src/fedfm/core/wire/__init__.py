"""The wire format: any value of a message as a head and one block of bytes, and as Flower's records. No pickle."""
