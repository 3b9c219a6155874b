"""Primitives of secure aggregation: keys, secret shares, masks, fixed-point numbers. They know no method."""
