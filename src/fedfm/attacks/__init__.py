"""Attacks: what an adversary does with what it saw (arrays in, figures out; none knows what a run is), and what
attackers among the clients of a run do (files with a class derived from :class:`fedfm.attacks.attack.Attack`).
"""
