"""The grouping of gradients against every grouping there is."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poseidon.cluster.curve import Curve
from poseidon.planner.buckets import best_buckets

layers = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 1e6), st.sampled_from("ab")), min_size=1, max_size=8)
curves = st.tuples(st.floats(0, 3), st.floats(1e5, 1e6)).map(lambda p: Curve.line(latency=p[0], bandwidth=p[1]))


def end_of(buckets, ready, num_bytes, curve):
    """When the last message has been sent, one after the other, each once all its gradients are there."""
    end = 0.0
    for bucket in buckets:
        end = max(end, *ready[: bucket[-1] + 1]) + curve.at(sum(num_bytes[i] for i in bucket))
    return end


def groupings(kinds):
    """Every way to cut a row into neighbours of one kind."""
    for cuts in itertools.product((False, True), repeat=len(kinds) - 1):
        buckets = [[0]]
        for index, cut in enumerate(cuts, start=1):
            if cut:
                buckets.append([index])
            else:
                buckets[-1].append(index)
        if all(len({kinds[i] for i in bucket}) == 1 for bucket in buckets):
            yield buckets


@given(layers=layers, curve=curves)
def test_no_grouping_ends_earlier(layers, curve):
    ready, num_bytes, kinds = zip(*layers, strict=True)
    found = best_buckets(ready, num_bytes, curve.at, kinds)
    assert found in list(groupings(kinds))
    earliest = min(end_of(buckets, ready, num_bytes, curve) for buckets in groupings(kinds))
    assert end_of(found, ready, num_bytes, curve) == pytest.approx(earliest)


def test_latency_merges_and_early_gradients_split():
    free = Curve.line(latency=0.0, bandwidth=1.0)
    dear = Curve.line(latency=5.0, bandwidth=1.0)
    assert best_buckets([1, 2, 3], [1, 1, 1], free.at) == [[0], [1], [2]]
    assert best_buckets([1, 2, 3], [1, 1, 1], dear.at) == [[0, 1, 2]]
    assert best_buckets([1, 2, 30], [1, 1, 1], dear.at) == [[0, 1], [2]]


def test_nothing_to_group():
    assert best_buckets([], [], lambda _: 1.0) == []
