"""Which layers' gradients share an all-reduce: the grouping that ends earliest, exactly.

Merging saves messages and their latency, and waits for the last gradient of the group. Of all ways to cut the layers,
in order of arrival, into groups of neighbours, the one whose last message ends first is found by dynamic programming:
the last group begins somewhere, and what is before it had better end as early as it can.

Source: Shi, Chu, Li, "MG-WFBP: efficient data communication for distributed synchronous SGD algorithms", INFOCOM 2019.
Beyond the paper: any curve of seconds by size, not only a straight line, and the optimum by the recurrence instead of
a greedy pass, which a straight line needs.
"""

from collections.abc import Callable, Hashable, Sequence


def best_buckets(
    ready: Sequence[float],
    num_bytes: Sequence[float],
    seconds: Callable[[float], float],
    kinds: Sequence[Hashable] | None = None,
) -> list[list[int]]:
    """Groups of neighbours such that the last message ends earliest, sent one after the other as they become ready.

    `end(j) = min over i of max(end(i), ready(j)) + seconds(num_bytes(i) + … + num_bytes(j - 1))`, in O(L²).

    Args:
        ready: When each layer's gradient is there, in seconds; what is sent waits for all before it too.
        num_bytes: What a rank sends for each layer.
        seconds: Of a message of so many bytes.
        kinds: Only layers of one kind share a message; all do if left out.

    Returns:
        Positions in `ready`, group by group, order kept, each exactly once. Of equally early groupings one of the
        fewest messages among those that the recurrence meets.
    """
    count = len(ready)
    ends: list[tuple[float, int]] = [(0.0, 0)]
    """When the first so many layers have been sent at the earliest, and in how many messages."""
    begins = [0]
    latest = 0.0
    for j in range(1, count + 1):
        latest = max(latest, ready[j - 1])
        best, begin = (float("inf"), 0), j - 1
        size = 0.0
        for i in range(j - 1, -1, -1):
            if kinds is not None and kinds[i] != kinds[j - 1]:
                break
            size += num_bytes[i]
            end, messages = ends[i]
            candidate = (max(end, latest) + seconds(size), messages + 1)
            if candidate < best:
                best, begin = candidate, i
        ends.append(best)
        begins.append(begin)
    return _trace_back(begins, count)


def _trace_back(begins: Sequence[int], count: int) -> list[list[int]]:
    buckets: list[list[int]] = []
    while count:
        buckets.append(list(range(begins[count], count)))
        count = begins[count]
    return buckets[::-1]
