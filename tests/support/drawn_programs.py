"""Programs as hypothesis draws them: mostly in step on both ranks, some on purpose not."""

from dataclasses import replace

from hypothesis import strategies as st

from support.programs import OPTIMIZERS, PARTS, SCHEMES_BY_LAYER, WORLD_SIZE, Program, Way

ROWS = st.integers(1, 4)


@st.composite
def ways(draw: st.DrawFn, *, sparse: bool) -> Way:
    """Any scheme for any layer that it fits, some of them deferred."""
    schemes = {}
    for layer, kinds in SCHEMES_BY_LAYER.items():
        kind = draw(st.sampled_from(kinds))
        if layer == "embedding" and sparse:
            kind = "sparse_rows"
        if kind != "all_reduce":
            schemes[layer] = kind
    can_wait = [
        layer
        for layer in SCHEMES_BY_LAYER
        if schemes.get(layer) != "sharded_server" and not (sparse and layer == "embedding")
    ]
    one_bucket_each = draw(st.booleans())
    return Way(
        schemes=tuple(schemes.items()),
        deferred=tuple(layer for layer in can_wait if draw(st.booleans())) if draw(st.booleans()) else (),
        one_bucket_each=one_bucket_each,
        wait_free=draw(st.booleans()),
        rows=draw(ROWS),
    )


class _Rank:
    """What a rank has done so far, as far as it decides what may follow."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.ops: list[str] = []
        self.at_hand = 0
        """Losses that a backward pass may still come by."""
        self.has_local = False
        """Whether something has been added up inside `no_sync`."""

    def forward(self) -> None:
        parts = "".join(part for part in PARTS if self.draw(st.booleans())) or self.draw(st.sampled_from(PARTS))
        self.ops.append(f"forward {self.draw(ROWS)} {parts}")
        self.at_hand += 1

    def backward(self) -> None:
        while not self.at_hand or (self.at_hand < 3 and not self.draw(st.integers(0, 4))):
            self.forward()
        if not self.draw(st.integers(0, 7)):
            self.ops.append(f"weight {self.draw(st.integers(1, 9))}")
        count = self.draw(st.integers(1, self.at_hand))
        if self.draw(st.integers(0, 5)):
            self.ops.append(f"backward {count}")
            self.at_hand -= count
        else:
            self.ops.append(f"backward {count} keep")

    def alone(self) -> None:
        """Something that the other rank need not do."""
        what = self.draw(
            st.sampled_from(["accumulate", "half", "forward", "forget", "infer", "flush", "state", "read"])
        )
        match what:
            case "accumulate":
                self.ops.append("no_sync")
                self.backward()
                self.ops.append("sync")
                self.has_local = True
            case "half":
                self.forward()
                self.ops.append("no_sync")
                self.backward()
                self.ops.append("sync")
                self.has_local = True
            case "forward":
                self.forward()
            case "forget":
                self.forward()
                self.ops.append("drop")
                self.at_hand = 0
            case "infer":
                self.ops.append(f"infer {self.draw(ROWS)} {self.draw(st.sampled_from(['t', 'ab', 'tabcd']))}")
            case _:
                self.ops.append(what)

    def exchange(self) -> None:
        if not self.draw(st.integers(0, 7)):
            self.ops.append("empty")
        elif not self.draw(st.integers(0, 7)):
            self.ops.append("no_sync")
            self.forward()
            self.ops.append("sync")
            self.backward()
        else:
            self.backward()
        self.has_local = False


@st.composite
def programs_in_step(draw: st.DrawFn) -> Program:
    """Both ranks take part in the same exchanges."""
    sparse = not draw(st.integers(0, 7))
    optimizer = "sgd" if sparse else draw(st.sampled_from(sorted(OPTIMIZERS)))
    mean = draw(st.sampled_from(["ranks", "samples"]))
    plans = draw(st.lists(ways(sparse=sparse), min_size=1, max_size=2))
    ranks = [_Rank(draw) for _ in range(WORLD_SIZE)]
    present = 0

    def together(op: str) -> None:
        for rank in ranks:
            rank.ops.append(op)

    for _ in range(draw(st.integers(1, 4))):
        for _ in range(draw(st.sampled_from([1, 1, 1, 1, 2, 0]))):
            for rank in ranks:
                for _ in range(draw(st.integers(0, 2))):
                    rank.alone()
                rank.exchange()
        for rank in ranks:
            for _ in range(draw(st.sampled_from([0, 0, 1]))):
                rank.alone()
        if any(rank.has_local for rank in ranks):  # an optimizer that steps now would use what only this rank knows
            if not draw(st.integers(0, 3)):
                together(draw(st.sampled_from(["zero", "zero keep"])))
                for rank in ranks:
                    rank.has_local = False
            continue
        if not sparse and not plans[present].served and not draw(st.integers(0, 4)):
            together("clip")
        if draw(st.integers(0, 7)):
            together("step")
            for rank in ranks:
                rank.at_hand = 0
        if draw(st.integers(0, 7)):
            together(draw(st.sampled_from(["zero", "zero", "zero keep"])))
            for rank in ranks:
                rank.has_local = False
        match draw(st.integers(0, 15)):
            case 0:
                together("check")
            case 3:
                together("zero")
                last = ranks[draw(st.integers(0, WORLD_SIZE - 1))]
                for _ in range(draw(st.integers(0, 2))):
                    last.exchange()
                    last.ops += ["step", "zero"]
                    last.at_hand = 0
                together("drain")
                for rank in ranks:
                    rank.at_hand = 0
            case 1 | 2:
                present = draw(st.integers(0, len(plans) - 1))
                together(f"{draw(st.sampled_from(['adopt', 'attach']))} {present}")
    return Program(
        ops=(tuple(ranks[0].ops), tuple(ranks[1].ops)), ways=tuple(plans), optimizer=optimizer, sparse=sparse, mean=mean
    )


@st.composite
def programs_out_of_step(draw: st.DrawFn) -> Program:
    """One rank takes part in an exchange less."""
    program = draw(programs_in_step().filter(lambda program: bool(_exchanges(program.ops[0]))))
    rank = draw(st.integers(0, WORLD_SIZE - 1))
    ops = list(program.ops[rank])
    del ops[draw(st.sampled_from(_exchanges(tuple(ops))))]
    others = [tuple(ops) if index == rank else mine for index, mine in enumerate(program.ops)]
    return replace(program, ops=(others[0], others[1]))


def _exchanges(ops: tuple[str, ...]) -> list[int]:
    """Where a rank takes part in one, and nothing that it does later hangs on that."""
    found, syncing = [], True
    for place, op in enumerate(ops):
        syncing = {"no_sync": False, "sync": True}.get(op, syncing)
        if syncing and (op == "empty" or op.startswith("backward")):
            found.append(place)
    return found
