"""`poseidon checkpoint` in a terminal."""

import re
from pathlib import Path

import pytest
import torch
import typer

from poseidon.cli.checkpoint import checkpoint
from poseidon.errors import CheckpointError
from poseidon.runtime.checkpoint import Found, Shelf


def save(folder: Path, step: int, **facts: float) -> Found:
    draft = Shelf(folder).begin(step)
    return draft.seal([draft.write("model", {"weight": torch.full((256,), step)})], {"world_size": 4, **facts})


def rows(output: str) -> list[list[str]]:
    """Cells of the table, by line."""
    return [re.split(r"\s{2,}", line.strip()) for line in output.splitlines() if re.match(r"\s+[0-9]+\s", line)]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


def test_a_list_says_what_is_complete_and_what_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in range(4):
        save(tmp_path / "checkpoints", step, score=step / 8)
    newest, third, second, _ = Shelf(tmp_path / "checkpoints").found()
    newest.file("model").unlink()
    (third.path / "manifest.json").write_text("{")
    content = second.file("model").read_bytes()
    second.file("model").write_bytes(content[:-1] + b"x")
    checkpoint("list", tmp_path)
    listed = rows(capsys.readouterr().out)
    assert [row[0] for row in listed] == ["3", "2", "1", "0"]
    assert listed[0][-3:] == ["4", "0.375", "the file of model is missing"]
    assert listed[1][-1].startswith("its manifest is torn")
    assert listed[2][-1] == "complete"  # as far as sizes tell
    checkpoint("verify", tmp_path)
    listed = rows(capsys.readouterr().out)
    assert listed[2][-1] == "model.safetensors is not what was written: its checksum is another"
    assert listed[3][-1] == "complete"


def test_where_none_is_complete_it_ends_with_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint is in"):
        checkpoint("list", tmp_path)
    with pytest.raises(CheckpointError, match="there is no such folder"):
        checkpoint("list", tmp_path / "none")
    save(tmp_path, 1).file("model").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is complete"):
        checkpoint("verify", tmp_path)


def test_weights_out_and_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "run", 7)
    checkpoint("export", tmp_path / "run", tmp_path / "weights.pt")
    assert torch.equal(torch.load(tmp_path / "weights.pt", weights_only=True)["weight"], torch.full((256,), 7))
    checkpoint("import", tmp_path / "new", tmp_path / "weights.pt")
    assert f"1 tensor written to {tmp_path / 'new' / 'step-000000000'}" in capsys.readouterr().out
    found = Shelf(tmp_path / "new").newest()
    assert found is not None
    assert torch.equal(found.read("model")["weight"], torch.full((256,), 7))
    with pytest.raises(CheckpointError, match="there are checkpoints already"):
        checkpoint("import", tmp_path / "new", tmp_path / "weights.pt")


def test_files_where_they_belong(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="name a file to export"):
        checkpoint("export", tmp_path)
    with pytest.raises(typer.BadParameter, match="list takes only a folder"):
        checkpoint("list", tmp_path, tmp_path / "weights.pt")
