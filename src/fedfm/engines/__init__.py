"""How requests reach clients: in this process, in worker processes, and over Flower."""
