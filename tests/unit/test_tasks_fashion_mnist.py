"""Fashion-MNIST: which files are used, and that damaged ones are not."""

import gzip
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from poseidon.errors import ConfigError
from poseidon.tasks import Task, load_task
from poseidon.tasks import fashion_mnist as fashion

NAMES = tuple(fashion._CHECKSUMS)


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("POSEIDON_DATA", raising=False)
    monkeypatch.setattr(fashion, "_DEBIAN_FOLDER", tmp_path / "debian")


def make_folder(folder: Path, names: tuple[str, ...] = NAMES) -> Path:
    """A folder with files of these names that hold nothing of use."""
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_bytes(b"\x00\x00\x08\x01\x00\x00\x00\x00")
    return folder


def load(data: str | Path | None = None) -> Task:
    return load_task("fashion-mnist", data=data)


def test_the_embedded_images_are_split_and_none_is_in_both() -> None:
    task = load()
    train, test = task.make_train_data(), task.make_test_data()
    assert (len(train), len(test)) == (9000, 1000)
    assert "embedded 10 000" in task.note
    assert (
        sum(int(train[index][1]) for index in range(9000)) + sum(int(test[index][1]) for index in range(1000)) == 45_000
    )


def test_images_are_normalized_and_labels_are_integers() -> None:
    data = load().make_train_data()
    images = torch.stack([data[index][0] for index in range(2000)])
    assert images.shape == (2000, 1, 28, 28)
    assert images.mean().item() == pytest.approx(0, abs=0.03)
    assert images.std().item() == pytest.approx(1, abs=0.03)
    assert data[0][1].dtype == torch.int64


def test_reading_a_sample_twice_gives_the_same() -> None:
    data = load().make_train_data()
    assert torch.equal(data[3][0], data[3][0])


def test_four_readers_at_once_see_the_same() -> None:
    with ThreadPoolExecutor(4) as readers:
        sets = list(readers.map(lambda _: load().make_test_data(), range(4)))
    assert all(torch.equal(sets[0][7][0], other[7][0]) for other in sets[1:])


@pytest.mark.parametrize("below", ["", "fashion-mnist"])
def test_a_given_folder_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str) -> None:
    folder = make_folder(tmp_path / "given" / below)
    monkeypatch.setenv("POSEIDON_DATA", str(make_folder(tmp_path / "environment")))
    make_folder(tmp_path / "debian")
    assert f"from {folder}, 60 000" in load(tmp_path / "given").note


def test_the_environment_comes_before_the_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSEIDON_DATA", str(make_folder(tmp_path / "environment")))
    make_folder(tmp_path / "debian")
    assert str(tmp_path / "environment") in load().note


def test_the_installed_package_comes_before_the_embedded_part(tmp_path: Path) -> None:
    make_folder(tmp_path / "debian")
    assert str(tmp_path / "debian") in load().note
    assert "embedded" in load("embedded").note


def test_an_installed_package_with_a_file_missing_is_not_used(tmp_path: Path) -> None:
    make_folder(tmp_path / "debian", NAMES[1:])
    assert "embedded" in load().note


def test_the_environment_can_ask_for_the_embedded_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path / "debian")
    monkeypatch.setenv("POSEIDON_DATA", "embedded")
    assert "embedded" in load().note


def test_a_given_folder_without_the_files_is_refused(tmp_path: Path) -> None:
    make_folder(tmp_path / "given", NAMES[:3])
    with pytest.raises(ConfigError, match=f"as given: .*given lacks {NAMES[3]} .*'embedded'"):
        load(tmp_path / "given")


def test_a_wrong_environment_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSEIDON_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="nowhere, as POSEIDON_DATA says"):
        load()


def test_files_of_another_set_are_refused(tmp_path: Path) -> None:
    task = load(make_folder(tmp_path / "given"))
    with pytest.raises(ConfigError, match=f"{NAMES[0]}: .*expected {fashion._CHECKSUMS[NAMES[0]]}"):
        task.make_train_data()


def test_a_damaged_embedded_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = Path(shutil.copytree(fashion._EMBEDDED_FOLDER, tmp_path / "copied"))
    labels = copied / "t10k-labels-idx1-ubyte.gz"
    content = bytearray(gzip.decompress(labels.read_bytes()))
    content[100] ^= 1
    labels.write_bytes(gzip.compress(bytes(content)))
    monkeypatch.setattr(fashion, "_EMBEDDED_FOLDER", copied)
    with pytest.raises(ConfigError, match=r"t10k-labels-idx1-ubyte.gz: .*SHA-256"):
        load().make_train_data()


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_whole_set_is_loaded_plain_or_gzipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    """With the embedded files in the place of the training set, since the whole set is not at hand."""
    folder = tmp_path / "whole"
    folder.mkdir()
    checksums = {}
    for name, checksum in fashion._CHECKSUMS.items():
        embedded = name.replace("train", "t10k")
        checksums[name] = fashion._CHECKSUMS[embedded]
        content = (fashion._EMBEDDED_FOLDER / f"{embedded}.gz").read_bytes()
        (folder / f"{name}{suffix}").write_bytes(content if suffix else gzip.decompress(content))
        assert checksum
    monkeypatch.setattr(fashion, "_CHECKSUMS", checksums)
    task = load(folder)
    assert (len(task.make_train_data()), len(task.make_test_data())) == (10_000, 10_000)


def test_the_licence_travels_with_the_images() -> None:
    licence = (fashion._EMBEDDED_FOLDER / "LICENSE-fashion-mnist").read_text(encoding="utf-8")
    assert "The MIT License" in licence
    assert "Zalando SE" in licence
