"""Names of metrics in ``metrics.jsonl`` and in a run's result, for all code that writes or reads them."""

from __future__ import annotations

ACCURACY = "accuracy"  # a run's accuracy: the global one if the method has one model, else the local one
GLOBAL_ACCURACY = "global_accuracy"  # on the global test rows
LOCAL_ACCURACY = "local_accuracy"  # the mean over clients, each on its own test rows
BALANCED_ACCURACY = "balanced_accuracy"
MACRO_F1 = "macro_f1"
LOSS = "loss"
PERPLEXITY = "perplexity"
LOCAL_LOSS = "local_loss"
METRICS = "metrics"  # a dict: the values of a Trainer's compute_metrics

SHARES = (ACCURACY, GLOBAL_ACCURACY, LOCAL_ACCURACY, BALANCED_ACCURACY, MACRO_F1)  # from 0 to 1, more is better
SCORES = (*SHARES, LOSS, PERPLEXITY)
