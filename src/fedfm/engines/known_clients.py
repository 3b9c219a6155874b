"""Find the client names of a run before the clients connect, if a kit, a roster or the data list them."""

from __future__ import annotations

from pathlib import Path

from fedfm.config.cohorts import enough
from fedfm.config.experiment import Experiment
from fedfm.core import tasks
from fedfm.errors import InputError


def known_clients(experiment: Experiment) -> tuple[list[str], str] | None:
    """The names and their source; None if they become known only from the clients' answers to hellos.

    Raises:
        InputError: the file or the kit cannot be read.
    """
    spec = experiment.run
    if spec.engine == "folder" and spec.roster is not None:
        from fedfm.runtime.rosters import roster_in

        try:
            return sorted(roster_in(Path(spec.roster).expanduser())), f"the roster {spec.roster}"
        except InputError as error:
            raise InputError(f"run.{error}") from None
    if spec.engine == "deployment" and spec.superlink is not None and Path(spec.superlink).is_dir():
        from fedfm.engines.flower import kit_manifest

        kit = kit_manifest.load(Path(spec.superlink))
        return (kit_manifest.silos_of(kit), f"the kit {spec.superlink}") if kit.serves else None
    return None


def dealt_clients(experiment: Experiment) -> list[str]:
    """Names of the clients to which the experiment distributes its own rows. This reads the rows.

    Raises:
        InputError: data or partition are invalid.
    """
    from fedfm.data.load import load_table
    from fedfm.data.partition import deal

    if experiment.own_code:
        from fedfm.runtime import user_population

        return list(user_population.of_experiment(experiment).clients)
    spec, seed, base = experiment.model, experiment.run.seed, tasks.trained_classes(experiment.model)
    table = load_table(experiment.data, seed=seed, task=spec.task, trained_classes=base)
    return sorted(deal(table, experiment.data, seed=seed).clients)


def check_known(experiment: Experiment) -> None:
    """Check the rules on the number of clients, if their names are known.

    Raises:
        InputError: the federation has too few silos; the error says how many are needed.
    """
    if (found := known_clients(experiment)) is not None and found[0]:
        enough(experiment, *found)
