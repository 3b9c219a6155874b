"""EM in batches of tensors on a device that is not the host's: what of a GPU can be tested without one."""

import numpy as np
import pytest
import torch
from elsewhere import DEVICE, Elsewhere
from test_mixture_em import blobs

from fedfm.methods.fedpft.mixtures import COVARIANCES, batched, fit


def test_the_device_refuses_tensors_of_the_host_and_counts_waits():
    here = torch.arange(3.0, dtype=torch.float64)
    with Elsewhere() as device:
        there = here.to(DEVICE)
        assert there.device == DEVICE
        np.testing.assert_array_equal((2 * there + there.new_ones(3)).cpu().numpy(), [1, 3, 5])
        assert (device.up, device.down, +device.waits, +device.narrow) == (1, 1, {}, {})
        for meeting in (lambda: there + here, lambda: here @ there, lambda: there[here.long()]):
            with pytest.raises(RuntimeError, match="expected all tensors on"):
                meeting()
        with pytest.raises(RuntimeError):
            there.numpy()
        assert bool((there > 1).any())
        there[there > 0].float()
        assert sum(device.waits.values()) == 2  # the number, the mask
        assert list(+device.narrow) == ["aten._to_copy"]


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_em_stays_on_the_device_and_waits_once_a_step(covariance):
    """Bit for bit the mixtures of device "cpu"; what crosses is one flag vector a step, and the mixtures that ended."""
    sizes = [(1, 1), (12, 2), (40, 4), (44, 3), (45, 1), (150, 7), (160, 5), (300, 7)]
    d = 4 if covariance == "full" else 20
    groups = [blobs(n, d, k, seed=i, apart=1.5)[0] for i, (n, k) in enumerate(sizes)]
    components = [k for _, k in sizes]
    here = fit(groups, components, covariance, seeds=range(len(groups)), device="cpu")
    with Elsewhere() as device:
        there = fit(groups, components, covariance, seeds=range(len(groups)), device=DEVICE)
    for a, b in zip(here, there, strict=True):
        assert (b.log_likelihood, b.iterations, b.converged) == (a.log_likelihood, a.iterations, a.converged)
        for name in ("weights", "means", "scales"):
            np.testing.assert_array_equal(getattr(b.mixture, name), getattr(a.mixture, name))
    several = {i: (n, d, k) for i, (n, k) in enumerate(sizes) if k > 1}
    buckets = batched.buckets(several, covariance)
    steps = sum(1 + max(here[i].iterations for i in bucket) for bucket in buckets)
    endings = sum(len({here[i].iterations for i in bucket}) for bucket in buckets)
    assert steps > 12 > endings
    assert device.up <= 3 * len(buckets) + 2 * endings  # rows, labels, sizes; who has ended, who goes on
    assert device.down <= steps + 4 * endings  # weights, means, scales, log-likelihoods
    assert list(+device.narrow) == ["aten._to_copy"]  # scales, as they leave
    factors = {"aten._linalg_check_errors"} if covariance == "full" else set()  # a factor that fails raises
    assert set(+device.waits) == factors
    assert sum(device.waits.values()) <= steps
