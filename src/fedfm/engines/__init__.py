"""How requests reach clients: in this process, in worker processes, over Flower, and as files in a folder."""
