"""A client that trains with several processes, each of which has a part of every weight. Only such a run loads it."""
