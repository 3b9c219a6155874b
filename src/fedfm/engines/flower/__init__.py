"""The engines on Flower: its simulation, its deployment, and the apps of both. Only this package imports Flower."""

from importlib.util import find_spec

from fedfm.errors import MissingExtra

if find_spec("flwr") is None:
    raise MissingExtra(
        'Flower is not installed, and only run.engine = "local" works without it: pip install "fedfm[flower]"'
    )
