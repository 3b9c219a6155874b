"""What stale statistics of batch norm cost: test accuracy of finished runs with each batch's own statistics instead.

    python reproduce/fedbaf/batch_norm.py table3__none.iid      # after python reproduce/run.py fedbaf --only table3

FedBaF mixes the weights of batch norm and averages its running statistics, which are then those of the clients' models
before the mixture. The second figure takes mean and variance from batches of 250 test rows, so that it knows no stale
ones; it is a diagnosis, not a score, since the test rows of a batch are used together.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path

import torch

from fedfm.api import predict
from fedfm.data.load import load_table

HERE = Path(__file__).resolve().parents[1]


def accuracies(out: Path) -> tuple[float, float]:
    """(with running statistics, with those of the batch), of a finished run's last model."""
    run, model, _ = predict.load(out)
    data, seed = run.experiment.data, run.experiment.run.seed
    table = load_table(data, seed=seed)
    rows = model.prepare(table, table.rows("test"))
    found = []
    for own in (False, True):
        for module in model.module.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.train(own)
                module.momentum = 0.0  # looking changes nothing
        right = 0
        with torch.no_grad():
            for index in torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).split(250):
                batch = rows.batch(index.numpy())
                logits = model.module(pixel_values=batch["pixel_values"]).logits
                right += int((logits.argmax(1) == batch["labels"]).sum())
        found.append(right / len(rows))
    return found[0], found[1]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", help="e.g. table3__none.iid")
    rows = parser.parse_args().rows
    os.chdir(HERE)
    for name in rows:
        pairs = [accuracies(out) for out in sorted((HERE / ".runs" / "fedbaf").glob(f"{name}-seed*"))]
        running, own = (100 * statistics.fmean(p) for p in zip(*pairs, strict=True))
        print(
            f"{name}: {running:.1f} with running statistics, {own:.1f} with the batch's ({len(pairs)} seeds)",
            flush=True,
        )


if __name__ == "__main__":
    main()
