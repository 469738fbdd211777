"""TLS by flag on everything that listens, with a certificate that clients check; files that cannot be used are told before it listens."""

from __future__ import annotations

import signal
import ssl
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from observability.errors import ConfigError, StoreError
from observability.store.recorder import HttpTarget
from observability.tls import Tls
from tests.conftest import require, wait_for


@dataclass(frozen=True)
class Pair:
    cert: Path
    key: Path
    locked: Path  # the key with a passphrase
    other: Path  # another key

    @property
    def options(self) -> tuple[str, ...]:
        return ("--tls-cert", str(self.cert), "--tls-key", str(self.key))

    def client(self) -> httpx.Client:
        return httpx.Client(verify=ssl.create_default_context(cafile=str(self.cert)), trust_env=False, timeout=10)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    import shutil

    require(shutil.which("openssl"), "openssl is not installed: apt-get install openssl")
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*argv: str) -> None:
        subprocess.run(["openssl", *argv], cwd=folder, check=True, capture_output=True)

    openssl(
        "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "key.pem", "-out", "cert.pem", "-days", "2",
        "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1",
    )  # fmt: skip
    openssl("rsa", "-aes256", "-passout", "pass:x", "-in", "key.pem", "-out", "locked.pem")
    openssl("genrsa", "-out", "other.pem", "2048")
    return Pair(*(folder / f"{name}.pem" for name in ("cert", "key", "locked", "other")))


COMMANDS = {
    "serve": (("serve", "tiny"), "/metrics"),
    "route": (("route", "--replica", "http://127.0.0.1:9"), "/metrics"),
    "gpu": (("gpu",), "/metrics"),
    "app": (("app", "--source", "prometheus:http://127.0.0.1:9"), "/_stcore/health"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_serves_https_and_no_http(
    name: str, pair: Pair, spawn: Callable[..., subprocess.Popen[bytes]], free_port: Callable[[], int], tmp_path: Path
) -> None:
    argv, path = COMMANDS[name]
    port, log = free_port(), tmp_path / "log"
    with log.open("wb") as out:
        process = spawn(
            sys.executable, "-m", "observability.cli", *argv, "--port", str(port), *pair.options, stdout=out, stderr=out
        )
    with pair.client() as client:
        wait_for(lambda: client.get(f"https://127.0.0.1:{port}{path}").status_code == 200, 90, "https answers")
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"https://127.0.0.1:{port}{path}", trust_env=False)
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{port}{path}", trust_env=False).raise_for_status()
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    if name != "app":
        assert f"https://127.0.0.1:{port}" in log.read_text()


def test_a_recorder_trusts_the_certificates_of_ssl_cert_file(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from exporters.prometheus import start_exporter
    from tests.telemetry.bench import Bench

    with start_exporter(Bench().t, token="t", tls=Tls.of(pair.cert, pair.key)) as exporter:
        assert exporter.url.startswith("https://")
        with pytest.raises(StoreError, match="CERTIFICATE_VERIFY_FAILED"):
            HttpTarget(exporter.url, token="t").scrape()
        monkeypatch.setenv("SSL_CERT_FILE", str(pair.cert))
        assert HttpTarget(exporter.url, token="t").scrape().series


def test_files_that_cannot_be_used_are_told_and_nobody_is_asked_for_a_passphrase(pair: Pair, tmp_path: Path) -> None:
    missing, garbage = tmp_path / "none.pem", tmp_path / "garbage.pem"
    garbage.write_bytes(b"\x00" * 100)
    assert Tls.of(None, None) is None
    assert Tls.of(pair.cert, pair.key) == Tls(pair.cert, pair.key)
    for cert, key in (
        (pair.cert, None), (None, pair.key), (pair.cert, pair.other), (pair.cert, pair.locked), (pair.cert, missing),
        (missing, pair.key), (garbage, pair.key), (pair.cert, garbage), (pair.key, pair.cert), (tmp_path, pair.key),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="Next: "):
            Tls.of(cert, key)
