"""Primitives of secure aggregation (keys, secret shares, masks, fixed-point numbers) and of encrypted inference (CKKS).

They know no client, no server and no method.
"""
