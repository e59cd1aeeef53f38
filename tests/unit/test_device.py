"""The rates of the processor: what was computed over how long it took, whatever the machine."""

import time

import torch

from poseidon.profile import device
from poseidon.profile.device import measure_compute, seconds_of


def test_rates_are_work_over_time(monkeypatch) -> None:
    seconds = iter([0.5, 0.25])
    monkeypatch.setattr(device, "seconds_of", lambda work, where: next(seconds))
    rates = measure_compute()
    assert rates.flops_per_s == 2 * device.MATRIX_SIZE**3 / 0.5
    assert rates.memory_bandwidth == 2 * device.COPIED_NUM_BYTES / 0.25
    assert rates.threads == torch.get_num_threads()
    assert rates.name


def test_the_measured_work_is_really_done() -> None:
    rates = measure_compute()
    assert 1e6 < rates.flops_per_s < 1e16
    assert 1e6 < rates.memory_bandwidth < 1e14


def test_the_first_call_only_warms_up() -> None:
    naps = iter([0.2, 0.01, 0.01, 0.01])
    taken = seconds_of(lambda: time.sleep(next(naps)), torch.device("cpu"), seconds=0.0)
    assert 0.01 <= taken < 0.15
    assert next(naps) == 0.01, "two calls were timed"
