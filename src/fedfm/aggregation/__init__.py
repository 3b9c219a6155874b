"""How the server makes one update of many. The file's name is the rule's: ``[aggregation] name = "median"``."""
