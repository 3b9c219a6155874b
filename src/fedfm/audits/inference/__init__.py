"""The mathematics of inference attacks. This package works on arrays, and does not depend on runs."""
