"""What others have written is read within bounds: each limit is seen, with a line that says what was found."""

import gzip
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from poseidon import reading
from poseidon.artifact import Artifact
from poseidon.cluster.spec import ClusterSpec
from poseidon.comm.group import MOST_TEXT_BYTES, _longest_text
from poseidon.errors import CommError, ConfigError
from poseidon.plan import Plan
from poseidon.profile.graph import ModelProfile
from poseidon.reading import MOST_DEPTH, parse_json, parse_toml, read_bytes, read_lines, read_text
from poseidon.report.record import RunRecord
from poseidon.tasks import download, idx
from poseidon.tasks.idx import read_idx
from poseidon.timeline import Timeline, to_line
from poseidon.units import MIB, parse_bandwidth, parse_bytes
from support import runs

ARTIFACTS: tuple[type[Artifact], ...] = (Plan, ModelProfile, ClusterSpec)
HOSTILE_JSON = [
    pytest.param("[" * 100_000, "more than 64 deep", id="deep lists"),
    pytest.param('{"a":' * 100_000 + "1" + "}" * 100_000, "more than 64 deep", id="deep tables"),
    pytest.param("[" * (MOST_DEPTH + 1) + "]" * (MOST_DEPTH + 1), "more than 64 deep", id="a little too deep"),
    pytest.param('{"version": ' + "9" * 5000 + "}", "4300 digits", id="huge integer"),
    pytest.param('{"version": ' + "9" * 300 + "}", "'version' has a whole number of 997 bits", id="large integer"),
    pytest.param('{"version": NaN}', "key 'version' has nan", id="NaN"),
    pytest.param('{"a": [1, Infinity]}', "key 'a.1' has inf", id="infinity"),
    pytest.param('{"a": 1e999}', "key 'a' has inf", id="overflow"),
    pytest.param('{"hosts": [], "hosts": []}', "key 'hosts' is given twice", id="twins"),
    pytest.param('{"' + "k" * 500 + '": 1, "' + "k" * 500 + '": 1}', "key 'k{60}…' is given twice", id="long twins"),
    pytest.param("[" + "0," * 4_000_000 + "0]", "4,000,002 values, more than 4,000,000", id="many values"),
]


@pytest.mark.parametrize(("text", "reason"), HOSTILE_JSON)
@pytest.mark.parametrize("artifact", ARTIFACTS, ids=lambda one: one.__name__)
def test_hostile_json_is_one_line(artifact: type[Artifact], text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        artifact.parse(text, source="some.json")
    assert str(caught.value).startswith("cannot ")
    assert "some.json" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param("a = " + "[" * 10_000, "more than 64 deep", id="deep lists"),
        pytest.param("a" + ".a" * 100_000 + " = 1", "more than 64 deep", id="a key of many parts"),
        pytest.param('"a"' + " . 'a'" * 1000 + " = 1", "more than 64 deep", id="a quoted key of many parts"),
        pytest.param("[a" + ".a" * 1000 + "]", "more than 64 deep", id="a table of many parts"),
        pytest.param("a = " + "9" * 5000, "4300 digits", id="huge integer"),
        pytest.param("a = 9223372036854775808", "'a' has a whole number of 64 bits; 63 are the most", id="integer"),
        pytest.param("a = {b = nan}", "key 'a.b' has nan", id="NaN"),
        pytest.param("a = 1\na = 2", "Cannot overwrite a value", id="twins"),
        pytest.param("#" * (MIB + 1), "more than 1MiB", id="size"),
    ],
)
def test_hostile_toml_is_one_line(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        parse_toml(text, "lab.toml")
    assert "lab.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_within_the_limits_is_read() -> None:
    deep: Any = 1
    for _ in range(MOST_DEPTH):
        deep = [deep]
    assert parse_json(json.dumps(deep), "deep") == deep
    assert parse_json('{"a": 9223372036854775807, "b": -1.5e300}', "numbers") == {"a": 2**63 - 1, "b": -1.5e300}
    assert parse_json("[NaN]", "run.json", finite=False)[0] != 0
    dotted = ".".join("k" * MOST_DEPTH)
    assert parse_toml(f"{dotted[:-2]} = inf", "lab.toml")
    assert parse_toml(f'note = "{dotted}.{dotted}"'.replace(".", ". and "), "lab.toml")


def test_a_file_is_not_read_beyond_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with path.open("wb") as file:
        file.truncate(2**40)  # takes no room, and would take a TiB of memory
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=f"cannot read {path}: it has more than 64MiB"):
            Plan.load(path)
        assert tracemalloc.get_traced_memory()[1] < 200 * MIB
    finally:
        tracemalloc.stop()


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "plan.json")
    with pytest.raises(ConfigError, match=f"cannot read {tmp_path}/plan.json: it is no ordinary file"):
        Plan.load(tmp_path / "plan.json")
    with pytest.raises(ConfigError, match="cannot read /dev/zero: it is no ordinary file"):
        read_bytes("/dev/zero")
    with pytest.raises(ConfigError, match="cannot read /dev/zero: it is no ordinary file"):
        list(read_lines("/dev/zero"))


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(b'{"task": "\xff"}')
    with pytest.raises(ConfigError, match=f"cannot read {path}: 'utf-8' codec can't decode byte 0xff"):
        read_text(path)


def test_a_long_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"short\n" + b"x" * 100)
    with pytest.raises(ConfigError, match=f"cannot read line 2 of {path}: it has more than 99B"):
        list(read_lines(path, 99))
    assert list(read_lines(path, 100)) == [b"short", b"x" * 100]


@pytest.mark.parametrize(
    "line",
    [
        '{"rank": 0, "index": 0, "start": NaN, "end": 1}',
        '{"rank": 0, "index": 0, "start": 0, "end": 1e999}',
        '{"rank": 65536, "index": 0, "start": 0, "end": 1}',
        '{"rank": -1, "index": 0, "start": 0, "end": 1}',
        '{"rank": 0, "index": 9223372036854775808, "start": 0, "end": 1}',
        '{"rank": 0, "index": 0, "start": 0, "end": 1, "intervals": [' + "[" * 10_000 + "]}",
        "\xff",
    ],
)
def test_a_hostile_line_of_a_timeline_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "timeline.jsonl"
    good = to_line(runs.make_step(0, 0))
    path.write_bytes(good.encode() + line.encode("latin-1") + b"\n" + good.encode())
    with pytest.raises(ConfigError, match=f"cannot use line 2 of {path} as a step: "):
        Timeline.load(path)


def test_only_the_last_lines_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "timeline.jsonl"
    lines = [to_line(runs.make_step(0, index)) for index in range(20)]
    path.write_text("".join(lines))
    monkeypatch.setattr("poseidon.timeline.MOST_KEPT_BYTES", 5 * len(lines[-1]))
    assert [step.index for step in Timeline.load(path, last=4).steps] == [16, 17, 18, 19]
    with pytest.raises(ConfigError, match="the most that is kept"):
        Timeline.load(path)


@pytest.mark.parametrize(
    ("name", "line", "reason"),
    [
        ("steps.jsonl", "[]", "cannot use line 1 of .*steps.jsonl as a step"),
        ("steps.jsonl", '{"step": 1}', "key 'loss' is missing"),
        ("run.json", "{}", "cannot use .*run.json as the facts of a run"),
        ("run.json", "[" * 5000, "more than 64 deep"),
    ],
)
def test_a_hostile_folder_of_a_run_is_one_line(tmp_path: Path, name: str, line: str, reason: str) -> None:
    folder = runs.write_run(tmp_path / "run")
    (folder / name).write_text(f"{line}\n{line}\n" if name == "steps.jsonl" else line)
    with pytest.raises(ConfigError, match=reason):
        RunRecord.load(folder)


@pytest.mark.parametrize("world_size", [0, 2**16 + 1, 10**18])
def test_no_file_makes_room_for_ranks_that_nobody_has(tmp_path: Path, world_size: int) -> None:
    surroundings = {**runs.make_facts()["surroundings"], "world_size": world_size}
    with pytest.raises(ConfigError, match=r"key 'surroundings\.world_size' has"):
        RunRecord.load(runs.write_run(tmp_path / "run", surroundings=surroundings))
    plan = {**runs.make_plan().model_dump(mode="json"), "world_size": world_size}
    with pytest.raises(ConfigError, match="key 'world_size' has"):
        Plan.parse(json.dumps(plan))


def test_a_gzipped_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x-idx1-ubyte.gz"
    header = bytes((0, 0, 8, 1)) + (50 * MIB).to_bytes(4, "big")
    path.write_bytes(gzip.compress(header + bytes(50 * MIB)))
    assert path.stat().st_size < MIB
    assert len(read_idx(path)) == 50 * MIB
    monkeypatch.setattr(idx, "MOST_BYTES", 10 * MIB)
    with pytest.raises(ConfigError, match=f"cannot read {path}: it has more than 10MiB"):
        read_idx(path)


def test_a_download_that_never_ends_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "data.bin"
    source.write_bytes(bytes(3 * MIB))
    monkeypatch.setattr(download, "MOST_BYTES", 2 * MIB)
    with pytest.raises(ConfigError, match="it goes on after 2MiB, the most that is kept"):
        download.download(source.as_uri(), sha256="0" * 64, into=tmp_path / "kept")
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [".data.bin.lock"]


def test_a_link_in_the_place_of_our_own_file_is_not_followed(tmp_path: Path) -> None:
    source, victim, kept = tmp_path / "data.bin", tmp_path / "victim", tmp_path / "kept"
    source.write_bytes(b"data")
    victim.write_bytes(b"precious")
    kept.mkdir()
    (kept / ".data.bin.part").symlink_to(victim)
    with pytest.raises(ConfigError):
        download.download(source.as_uri(), sha256="0" * 64, into=kept)
    assert victim.read_bytes() == b"precious"


def test_a_temporary_name_cannot_be_foreseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def note(self: Path, target: Path) -> Path:
        seen.append(self.name)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "replace", note)
    for _ in range(2):
        with pytest.raises(ConfigError, match="Input/output error"):
            ClusterSpec.uniform(num_hosts=1, bandwidth="1Gbit/s").save(tmp_path / "lab.toml")
    assert len(set(seen)) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("lengths", [[10, -1], [10, MOST_TEXT_BYTES + 1], [2**62, 0]])
def test_a_text_that_a_rank_announces_is_bounded(lengths: list[int]) -> None:
    with pytest.raises(CommError, match=r"^gathering failed: rank [01] announces a text of -?\d+ bytes"):
        _longest_text(lengths, "gathering")
    assert _longest_text([10, 20], "gathering") == 20


def test_the_texts_of_many_ranks_are_bounded_together() -> None:
    with pytest.raises(CommError, match="rank 0 announces a text of 67108864 bytes, and 4MiB are the most"):
        _longest_text([MOST_TEXT_BYTES] * 1024, "gathering")


@pytest.mark.parametrize("text", ["1e400GB/s", 10**400])
def test_a_quantity_beyond_numbers_is_refused(text: str | int) -> None:
    for parse in (parse_bandwidth, parse_bytes):
        with pytest.raises(ConfigError, match="cannot read"):
            parse(text if isinstance(text, int) else text.removesuffix("/s" if parse is parse_bytes else ""))


def test_the_limits_are_above_what_poseidon_writes(tmp_path: Path) -> None:
    """The plan of a model with a thousand layers, and a step with ten thousand intervals, are far below."""
    plan = runs.make_plan()
    assert 1000 * len(plan.to_json()) / 3 < reading.MOST_FILE_BYTES / 10
    step = runs.make_step(0, 0)
    assert 10_000 * len(to_line(step)) / len(step.intervals) < reading.MOST_LINE_BYTES / 8
