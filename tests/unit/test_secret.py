"""The job's secret: where it comes from, who may read it, and that nobody sees it."""

import logging
from pathlib import Path

import pytest

from poseidon.comm.handshake import ClientHandshake, HandshakeError, ServerHandshake
from poseidon.comm.secret import Secret
from poseidon.comm.strangers import LINES_PER_PERIOD, PERIOD_SECONDS, StrangerLog
from poseidon.errors import ConfigError

TEXT = "0123456789abcdef" * 4


def test_from_the_environment_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(TEXT + "\n")
    path.chmod(0o600)
    assert Secret.find({}) is None
    for found in (Secret.find({"POSEIDON_SECRET": TEXT}), Secret.find({"POSEIDON_SECRET_FILE": str(path)})):
        assert found is not None
        assert found.hex == TEXT


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    path.write_text(TEXT)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"its mode is 0{mode:o}.*chmod 600"):
        Secret.read(path)


@pytest.mark.parametrize(
    ("text", "what"),
    [("", "0 hexadecimal digits"), ("not hex", "not hexadecimal"), ("ab" * 15, "30 hexadecimal digits")],
)
def test_what_is_no_secret_is_refused(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "secret"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=f"{what}.*openssl rand -hex 32"):
        Secret.read(path)
    with pytest.raises(ConfigError, match="No such file"):
        Secret.read(tmp_path / "none")


def test_it_is_not_shown() -> None:
    secret = Secret.find({"POSEIDON_SECRET": TEXT})
    assert TEXT not in f"{secret} {secret!r}"
    with pytest.raises(ConfigError) as caught:
        Secret.find({"POSEIDON_SECRET": TEXT[:-1]})
    assert TEXT[:8] not in str(caught.value)


def test_both_ends_prove_it_and_get_the_same_keys() -> None:
    secret = Secret.make()
    server, client = ServerHandshake(secret), ClientHandshake(secret)
    answer, keys = server.check(client.prove(server.greeting))
    assert client.check(answer) == keys
    assert keys.to_server != keys.to_client


def test_neither_end_takes_another_secret_a_repeated_proof_or_its_own_message_back() -> None:
    secret = Secret.make()
    server, stranger = ServerHandshake(secret), ClientHandshake(Secret.make())
    with pytest.raises(HandshakeError, match="does not know the job's secret"):
        server.check(stranger.prove(server.greeting))
    client = ClientHandshake(secret)
    proof = client.prove(server.greeting)
    with pytest.raises(HandshakeError, match="does not know"):
        ServerHandshake(secret).check(proof)
    with pytest.raises(HandshakeError, match="does not know"):
        client.check(proof[-32:])
    with pytest.raises(HandshakeError, match="does not speak this protocol"):
        client.prove(b"HTTP/1.1" + bytes(34))


def test_a_flood_of_strangers_is_a_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    strangers = StrangerLog(logging.getLogger("strangers"), "the coordinator", clock=lambda: now)
    for number in range(10_000):
        strangers.note(f"10.0.0.1:{number}", "no proof")
    assert len(caplog.records) == LINES_PER_PERIOD + 1
    now = PERIOD_SECONDS
    strangers.flush()
    assert "9980 more strangers (10000 in all)" in caplog.messages[-1]
    strangers.note("10.0.0.2:1", "no proof")
    assert "10.0.0.2:1" in caplog.messages[-1]
