"""Rules by which the server combines many updates into one. A rule has the name of its file: ``[aggregation] name =
"median"``.
"""
