"""Rules by which the server combines many updates into one. Each rule is chosen by the name of its file:
``[aggregation] name = "median"``.
"""
