"""Primitives of secure aggregation: keys, secret shares, masks, fixed-point numbers. They do not depend on methods."""
