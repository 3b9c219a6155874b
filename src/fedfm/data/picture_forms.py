"""Give a notice if the classes differ in the form of their image files: a model may learn the form, not the content."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fedfm.data.pictures import Look

_MANY = 20  # with fewer images a form may match a class by chance
_A_CLASS = 5  # with fewer images per class on average, a form may match a class by chance

_FORMS: tuple[tuple[str, Callable[[Look], str]], ...] = (
    ("in the format of their files", lambda one: one.form),
    ("in their colour space", lambda one: one.space or "RGB or grey"),
    ("in having colours", lambda one: "grey" if one.grey else "in colours"),
    ("in their size", lambda one: f"{one.size[0]} x {one.size[1]}"),
)


def notices(looks: Sequence[Look], labels: np.ndarray | None, classes: Sequence[str], source: str) -> tuple[str, ...]:
    """A notice if all images within a class have the same format, colours or size, and the classes differ in this.

    Args:
        looks: the result of :func:`fedfm.data.pictures.look` for each image.
        labels: (N,), or None without labels.
    """
    if labels is None:
        return ()
    there, first, of = np.unique(labels, return_index=True, return_inverse=True)
    if len(there) < 2 or len(looks) < max(_MANY, _A_CLASS * len(there)):
        return ()
    found = []
    for words, form in _FORMS:
        forms = np.array([form(one) for one in looks])
        if not (forms == forms[first[of]]).all() or len(set(forms[first].tolist())) < 2:
            continue
        other = next(i for i in range(len(there)) if forms[first[i]] != forms[first[0]])
        shown = " and ".join(f'every image of "{classes[there[i]]}" is {forms[first[i]]}' for i in (0, other))
        found.append(
            f"the classes of {source} differ {words}: {shown}: a model may learn this form in place of the content; "
            "save all images in one form"
        )
    return tuple(found)
