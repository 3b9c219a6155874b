"""Rules by which the server combines many updates into one. A rule is named after its file: ``[aggregation] name =
"median"``.
"""
