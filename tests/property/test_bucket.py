"""Buckets and stretches cover everything once, in order."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from poseidon.comm.bucket import Bucket, pieces, split_into_buckets, stretches
from poseidon.comm.sharded_server import _intersections

sizes = st.lists(st.integers(0, 1000), max_size=60)
limits = st.integers(1, 2000)


@given(sizes, limits, limits)
def test_buckets_cover_all_gradients_once_in_order(num_bytes, first_bytes, bucket_bytes):
    buckets = split_into_buckets(num_bytes, first_bytes=first_bytes, bucket_bytes=bucket_bytes)
    assert [index for bucket in buckets for index in bucket] == list(range(len(num_bytes)))
    for number, bucket in enumerate(buckets):
        limit = first_bytes if number == 0 else bucket_bytes
        assert bucket
        assert sum(num_bytes[index] for index in bucket[:-1]) < limit, "closed as soon as it is full"
        if bucket is not buckets[-1]:
            assert sum(num_bytes[index] for index in bucket) >= limit, "and not before"


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_stretches_cover_all_numbers_and_are_equal_to_within_one(count, world_size):
    parts = stretches(count, world_size)
    assert len(parts) == world_size
    assert [index for start, end in parts for index in range(start, end)] == list(range(count))
    lengths = {end - start for start, end in parts}
    assert max(lengths) - min(lengths) <= 1


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 300))
def test_pieces_cover_a_stretch(start, length, piece):
    cut = pieces(start, start + length, piece)
    assert [index for a, b in cut for index in range(a, b)] == list(range(start, start + length))
    assert all(0 < b - a <= piece for a, b in cut)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(1, 9))
def test_every_number_of_every_tensor_has_one_owner(counts, world_size):
    tensors = [torch.arange(count) for count in counts]
    found = [[] for _ in tensors]
    for start, end in stretches(sum(counts), world_size):
        parts = _intersections(tensors, start, end)
        assert sum(b - a for _, a, b in parts) == end - start
        for numbers, (tensor, a, b) in zip(found, parts, strict=True):
            numbers += tensor[a:b].tolist()
    assert found == [tensor.tolist() for tensor in tensors]


shapes = st.lists(st.lists(st.integers(1, 4), max_size=4), min_size=1, max_size=6)


@given(shapes, st.randoms(use_true_random=False))
def test_views_have_the_parameters_form_and_share_no_number(shapes, random):
    parameters = []
    for shape in shapes:
        order = random.sample(range(len(shape)), len(shape))
        parameters.append(nn.Parameter(torch.zeros(shape).permute(order)))
    bucket = Bucket(parameters)
    for index, (parameter, view) in enumerate(zip(parameters, bucket.views, strict=True)):
        assert view.shape == parameter.shape
        assert view.untyped_storage().data_ptr() == bucket.flat.untyped_storage().data_ptr()
        view.fill_(index + 1)
    bucket.facts.fill_(-1)
    expected = [index + 1 for index, p in enumerate(parameters) for _ in range(p.numel())]
    assert bucket.flat.tolist() == [*expected, *[-1] * (len(parameters) + 1)]
