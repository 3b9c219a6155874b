"""The components of a Flower app that runs an experiment: ``fedfm.apps:server`` and ``fedfm.apps:client``."""

from fedfm.engines.flower.apps import client, server

__all__ = ["client", "server"]
