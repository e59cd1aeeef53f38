"""Figures of a race, from turns that were made up."""

import io
import json
import math

import pytest
from rich.console import Console

from poseidon.report.compare import (
    Comparison,
    Measured,
    RankTurn,
    Spread,
    Turn,
    combine_ranks,
    describe,
    draw,
    fewest_steps,
    speedup,
)


def turn(*seconds: float, sent: float | None = 100.0, exposed: tuple[float, ...] | None = None) -> Turn:
    return Turn(step_seconds=seconds, bytes_sent_per_host=sent, wire_bytes_per_host=None, exposed_seconds=exposed)


OURS = Measured(name="poseidon", turns=[turn(1, 2, 3), turn(2, 2, 2)], losses=[3.0, 2.0, 1.0])
DDP = Measured(name="ddp", turns=[turn(4, 4, 9), turn(3, 3, 3)], losses=[3.0, 2.0])


def test_a_spread_interpolates() -> None:
    assert Spread.of([1, 2, 3, 4, 5]).model_dump() == pytest.approx({"median": 3, "p10": 1.4, "p90": 4.6})


def test_a_spread_of_one_number() -> None:
    assert Spread.of([7.0]) == Spread(median=7, p10=7, p90=7)


def test_the_ratio_is_taken_round_by_round() -> None:
    # medians 4 / 2 in the first round, 3 / 2 in the second
    assert speedup(OURS, DDP).model_dump() == pytest.approx({"median": 1.75, "p10": 1.55, "p90": 1.95})


def test_losses_are_compared_after_as_many_steps() -> None:
    assert fewest_steps([OURS, DDP]) == 2
    assert describe(OURS, 2).loss == 2.0


def test_a_loss_that_is_no_number_becomes_null() -> None:
    contender = describe(Measured(name="ddp", turns=[turn(1)], losses=[math.nan, 1.0]), 1)
    assert contender.loss is None
    assert contender.losses == (None, 1.0)


def test_exposed_seconds_are_the_median_over_all_steps() -> None:
    measured = Measured(name="x", turns=[turn(1, 1, exposed=(1, 5)), turn(1, exposed=(2,))], losses=[1.0])
    assert describe(measured, 1).exposed_seconds == 2
    assert describe(DDP, 1).exposed_seconds is None


def test_a_step_takes_the_mean_over_ranks_and_hosts_share_bytes() -> None:
    ranks = [
        RankTurn(step_seconds=(1, 5), bytes_sent=10, wire_bytes=90, exposed_seconds=(0, 2)),
        RankTurn(step_seconds=(3, 4), bytes_sent=20, wire_bytes=None, exposed_seconds=(1, 4)),
    ]
    combined = combine_ranks(ranks, num_hosts=1)
    assert combined.step_seconds == [2, 4.5]
    assert combined.bytes_sent_per_host == 30
    assert combined.wire_bytes_per_host == 90
    assert combined.exposed_seconds == [0.5, 3]


def test_what_nobody_measured_stays_unknown() -> None:
    rank = RankTurn(step_seconds=(1,), bytes_sent=None, wire_bytes=None, exposed_seconds=None)
    combined = combine_ranks([rank, rank], num_hosts=2)
    assert combined.bytes_sent_per_host is combined.wire_bytes_per_host is combined.exposed_seconds is None


def comparison() -> Comparison:
    return Comparison(
        task="mine",
        note="made up",
        hosts=4,
        cores_per_host=0.5,
        link="1Gbit/s",
        shaped=True,
        world_size=4,
        threads=1,
        device="cpu",
        torch="2.13.0",
        poseidon="0.1.0",
        batch_size=64,
        rounds=2,
        steps=3,
        compared_at_step=2,
        plan="all by all_reduce",
        contenders=(describe(OURS, 2), describe(DDP, 2)),
        speedup_over={"ddp": speedup(OURS, DDP)},
    )


def test_the_json_has_the_promised_names() -> None:
    data = json.loads(comparison().to_text())
    assert {"task", "hosts", "cores_per_host", "link", "world_size", "torch", "contenders", "speedup_over"} <= set(data)
    assert data["speedup_over"]["ddp"].keys() == {"median", "p10", "p90"}
    for contender in data["contenders"]:
        assert list(contender) == [
            "name",
            "step_seconds",
            "bytes_sent_per_host",
            "wire_bytes_per_host",
            "exposed_seconds",
            "loss",
            "losses",
        ]
        assert contender["wire_bytes_per_host"] is None  # unknown is null, not left out


def test_the_table_fits_80_columns() -> None:
    output = io.StringIO()
    console = Console(width=80, file=output)
    console.print(draw(comparison()))
    text = output.getvalue()
    assert "…" not in text
    assert "poseidon" in text
    assert "2s" in text
