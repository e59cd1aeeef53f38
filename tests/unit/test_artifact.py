"""Files of value classes: round trips, and errors that name the path, the key and the value."""

from pathlib import Path

import pytest
from pydantic import Field, ValidationError

from poseidon.artifact import Artifact, Value
from poseidon.errors import ConfigError
from poseidon.units import Bandwidth


class Link(Value):
    rate: Bandwidth
    note: str | None = None


class Lab(Artifact):
    version: int = 1
    hosts: tuple[str, ...]
    links: dict[str, Link] = Field(default_factory=dict)
    seed: int | None = None


LAB = Lab(hosts=("a", "b"), links={"ab": Link(rate=1.25e8)})


@pytest.fixture(params=["lab.toml", "lab.json", "lab"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / request.param


def test_a_file_gives_back_what_was_saved(path: Path) -> None:
    LAB.save(path)
    assert Lab.load(path) == LAB
    assert Lab.load(str(path)) == LAB


def test_a_file_is_written_whole_and_alone(path: Path) -> None:
    path.write_text("old")
    LAB.save(str(path))
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_the_suffix_decides_the_form(tmp_path: Path) -> None:
    LAB.save(tmp_path / "lab.toml")
    LAB.save(tmp_path / "lab.json")
    assert (tmp_path / "lab.toml").read_text().startswith("version = 1\n")
    assert (tmp_path / "lab.json").read_text().startswith('{\n  "version": 1,\n')
    assert (tmp_path / "lab.json").read_text().endswith("}\n")


def test_people_write_units(tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    path.write_text('hosts = ["a", "b"]\n[links.ab]\nrate = "1Gbit/s"\n')
    assert Lab.load(path) == LAB


def test_json_on_one_line_is_read_back() -> None:
    assert "\n" not in LAB.to_json()
    assert Lab.parse(LAB.to_json()) == LAB


def test_values_are_frozen_and_keyword_only() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        LAB.version = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        Link(1.0)  # type: ignore[call-arg]


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Lab.load(tmp_path / "lab.toml")
    assert str(caught.value) == f"cannot read {tmp_path}/lab.toml: No such file or directory"


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"cannot read {tmp_path}: Is a directory"):
        Lab.load(tmp_path)


def test_bytes_that_are_no_text(path: Path) -> None:
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=f"cannot read {path}: 'utf-8' codec can't decode byte 0xff"):
        Lab.load(path)


def test_not_toml(tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    path.write_text("hosts = []\nseed = ?")
    with pytest.raises(ConfigError, match=f"cannot read {path} as TOML: .*line 2"):
        Lab.load(path)


def test_not_json(tmp_path: Path) -> None:
    path = tmp_path / "lab.json"
    path.write_text('{"hosts": ["a"],}')
    with pytest.raises(ConfigError, match=f"cannot read {path} as JSON: .*line 1 column 17"):
        Lab.load(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{}", "key 'hosts' is missing"),
        ('{"hosts": [], "host": 1}', "key 'host' is not known here"),
        ('{"hosts": 3}', "key 'hosts' has 3: Input should be a valid tuple"),
        ('{"hosts": ["a", 7]}', "key 'hosts.1' has 7: Input should be a valid string"),
        ('{"hosts": [], "links": {"ab": {}}}', "key 'links.ab.rate' is missing"),
        ("[]", "key 'the whole' has []: Input should be a valid dictionary or instance of Lab"),
        ('{"version": "x", "seed": "y"}', "key 'version' has 'x': Input should be a valid integer, unable to parse"),
    ],
)
def test_a_key_that_cannot_be_used(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "lab.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        Lab.load(path)
    assert str(caught.value).startswith(f"cannot use {path} as a Lab: {reason}")


def test_every_wrong_key_is_told() -> None:
    with pytest.raises(ConfigError, match=r"key 'version' has 'x': .*; key 'hosts' is missing; key 'seed' has 'y': "):
        Lab.parse('{"version": "x", "seed": "y"}')


def test_a_wrong_quantity_says_what_is_known() -> None:
    with pytest.raises(ConfigError) as caught:
        Lab.parse('hosts = []\nlinks.ab.rate = "1Gb"', source="lab.toml", toml=True)
    assert str(caught.value) == (
        "cannot use lab.toml as a Lab: key 'links.ab.rate' has '1Gb': Value error, cannot read '1Gb' as a link rate: "
        "use one of the units bit/s, kbit/s, Mbit/s, Gbit/s, B/s, kB/s, MB/s, GB/s, for example '1Gbit/s'"
    )


def test_a_long_value_is_cut() -> None:
    with pytest.raises(ConfigError, match=r"key 'seed' has 'x{76}\.\.\.: "):
        Lab.parse(f'{{"hosts": [], "seed": "{"x" * 500}"}}')


def test_saving_into_a_missing_folder(path: Path) -> None:
    target = path.parent / "missing" / path.name
    with pytest.raises(ConfigError, match=f"cannot write {target}: No such file or directory"):
        LAB.save(target)


def test_saving_over_a_folder_is_refused(path: Path) -> None:
    path.mkdir()
    with pytest.raises(ConfigError, match=f"cannot write {path}: "):
        LAB.save(path)
