"""Names of figures in ``metrics.jsonl`` and in a run's result: one table for all that write or read them."""

from __future__ import annotations

ACCURACY = "accuracy"  # what a run states: the global one of a method with one model, else the local one
GLOBAL_ACCURACY = "global_accuracy"  # on the global test rows
LOCAL_ACCURACY = "local_accuracy"  # of each client on its own test rows, in the mean
BALANCED_ACCURACY = "balanced_accuracy"
MACRO_F1 = "macro_f1"
LOSS = "loss"
PERPLEXITY = "perplexity"
LOCAL_LOSS = "local_loss"

SHARES = (ACCURACY, GLOBAL_ACCURACY, LOCAL_ACCURACY, BALANCED_ACCURACY, MACRO_F1)  # from 0 to 1, more is better
SCORES = (*SHARES, LOSS, PERPLEXITY)
