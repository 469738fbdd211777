"""A session goes on with the same tokens on a replica that never saw it, through the snapshot that another one left; whatever is
wrong with a snapshot, the answer is the same and only costs its computation."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from observability.cli import root
from observability.engine import sessions
from observability.engine.clock import MonotonicClock
from observability.engine.engine import Engine
from observability.engine.executor.torch_executor import TorchExecutor
from observability.engine.kv import snapshot as format
from observability.engine.kv.snapshot import Snapshot
from observability.engine.loop import EngineThread
from observability.engine.model.loading import LoadedModel, load_model
from observability.engine.sessions import SessionStore, SnapshotDirectory, file_name, weights_fingerprint
from observability.engine.types import EngineConfig, Request, SamplingParams
from observability.errors import ConfigError
from observability.telemetry.recorder import Telemetry
from tests.conftest import wait_for
from tests.server.harness import HTTP, RunningServer, serving

HISTORY = "A conversation that has been going on for a while, long enough to fill some blocks of keys and values. " * 3
GREEDY = {"temperature": 0}
SEEDED = {"temperature": 1.0, "top_p": 0.9, "seed": 11}


def ask(url: str, session: str, prompt: str, **fields: Any) -> tuple[str, int]:
    """(text, cached prompt tokens) of one turn."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "ignore_eos": True, "session_id": session, **fields}
    answer = HTTP.post(url + "/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return answer.json()["choices"][0]["text"], usage["prompt_tokens_details"]["cached_tokens"]


def counts(url: str) -> dict[str, dict[str, int]]:
    return HTTP.get(url + "/health").json()["snapshots"]


def wait_written(url: str, number: int) -> None:
    wait_for(lambda: counts(url)["saves"]["written"] >= number, 10, "snapshot written")


@pytest.fixture(scope="module")
def undisturbed() -> Iterator[RunningServer]:
    """A replica that serves every turn itself and knows no snapshots."""
    with serving(load_model("tiny")) as server:
        yield server


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_session_that_changes_replicas_goes_on_with_the_same_tokens(
    undisturbed: RunningServer, tmp_path: Path, sampling: dict[str, Any]
) -> None:
    session, prompt = f"a session / with ../any characters \N{SNOWMAN} {sampling}", f"{sampling} {HISTORY}"
    model = load_model("tiny")
    with serving(model, snapshots=tmp_path) as a, serving(model, snapshots=tmp_path) as b:
        for turn, replica in enumerate((a, b, a, b)):
            before = counts(replica.url)
            stayed, _ = ask(undisturbed.url, session, prompt, **sampling)
            moved, cached = ask(replica.url, session, prompt, **sampling)
            assert moved == stayed
            after = counts(replica.url)
            if turn:
                assert cached >= len(HISTORY) // 16 * 16
                assert after["resumes"]["imported"] == before["resumes"]["imported"] + 1
                assert after["tokens"]["imported"] > before["tokens"]["imported"]
            wait_written(replica.url, before["saves"]["written"] + 1)
            prompt += f"{HISTORY[:50]} turn {turn}."


# -- what is wrong with a snapshot --------------------------------------------------------------------------------------


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[RunningServer]:
    """A replica that has seen nothing yet, with its snapshots in `tmp_path`."""
    with serving(load_model("tiny"), snapshots=tmp_path) as server:
        yield server
        server.check_books()


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A snapshot of a session whose only turn was HISTORY."""
    directory = tmp_path_factory.mktemp("genuine")
    with serving(load_model("tiny"), snapshots=directory) as server:
        ask(server.url, "s", HISTORY, **GREEDY)
        wait_written(server.url, 1)
    (file,) = directory.iterdir()
    assert file.name == file_name("s")
    return file.read_bytes()


def loaded(data: bytes) -> Snapshot:
    return format.load(data, max_bytes=1 << 30)


def changed(**fields: Any) -> Callable[[bytes], bytes]:
    return lambda data: format.dump(replace(loaded(data), **fields))


def newer(data: bytes) -> bytes:
    snapshot = loaded(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(format, "VERSION", format.VERSION + 1)
        return format.dump(snapshot)


def of_another_shape(data: bytes) -> bytes:
    snapshot = loaded(data)
    return format.dump(replace(snapshot, tensors={name: rows[:, :1] for name, rows in snapshot.tensors.items()}))


def not_finite(data: bytes) -> bytes:
    """A step that reads it fails, and so does every other request with that prefix."""
    snapshot = loaded(data)
    tensors = {name: rows.copy() for name, rows in snapshot.tensors.items()}
    next(iter(tensors.values())).reshape(-1)[7] = np.nan
    return format.dump(replace(snapshot, tensors=tensors))


def of_other_words(data: bytes) -> bytes:
    snapshot = loaded(data)
    return format.dump(replace(snapshot, tokens=np.roll(snapshot.tokens, 1)))


@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (lambda data: data[:1000] + bytes([data[1000] ^ 1]) + data[1001:], "checksum"),
        (lambda data: data[: len(data) // 2], "checksum"),
        (lambda data: b"", "content"),
        (lambda data: b"not a snapshot at all, but as long as the head of one", "content"),
        (newer, "version"),
        (changed(model="smollm2-135m"), "model"),
        (changed(fingerprint="0" * 32), "fingerprint"),
        (changed(kv_scheme="int8"), "kv_scheme"),
        (of_another_shape, "content"),
        (not_finite, "content"),
        (changed(tensors={}), "content"),
        (of_other_words, "diverged"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_snapshot_that_does_not_fit_costs_its_computation_only(
    genuine: bytes,
    reader: RunningServer,
    undisturbed: RunningServer,
    tmp_path: Path,
    tamper: Callable[[bytes], bytes],
    reason: str,
) -> None:
    path = tmp_path / file_name("t")
    path.write_bytes(tamper(genuine))
    text, cached = ask(reader.url, "t", HISTORY + "Go on.", **GREEDY)
    assert text == ask(undisturbed.url, "t", HISTORY + "Go on.", **GREEDY)[0]
    assert cached == 0
    assert {name: count for name, count in counts(reader.url)["resumes"].items() if count} == {reason: 1}
    wait_written(reader.url, 1)
    assert loaded(path.read_bytes()).fingerprint == loaded(genuine).fingerprint  # the next turn can be resumed


def test_the_genuine_snapshot_is_taken(
    genuine: bytes, reader: RunningServer, undisturbed: RunningServer, tmp_path: Path
) -> None:
    """What the refusals above are told apart from."""
    (tmp_path / file_name("g")).write_bytes(genuine)
    text, cached = ask(reader.url, "g", HISTORY + "Go on.", **GREEDY)
    assert text == ask(undisturbed.url, "g", HISTORY + "Go on.", **GREEDY)[0]
    assert cached == len(HISTORY) // 16 * 16


def test_a_replica_that_stops_leaves_the_last_turn(undisturbed: RunningServer, tmp_path: Path) -> None:
    with serving(load_model("tiny"), snapshots=tmp_path) as last:
        ask(last.url, "s", HISTORY, **GREEDY)
    with serving(load_model("tiny"), snapshots=tmp_path) as next_one:
        text, cached = ask(next_one.url, "s", HISTORY + "Go on.", **GREEDY)
    assert text == ask(undisturbed.url, "s", HISTORY + "Go on.", **GREEDY)[0]
    assert cached == len(HISTORY) // 16 * 16


@pytest.mark.parametrize("kind", ["pipe", "directory", "link", "huge"])
def test_what_is_no_plain_file_of_sane_size_is_not_read(
    genuine: bytes, reader: RunningServer, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / file_name(kind)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "link":
        (tmp_path / "elsewhere").write_bytes(genuine)
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.touch()
        os.truncate(path, 10 << 30)
    _, cached = ask(reader.url, kind, HISTORY + "Go on.", **GREEDY)
    assert cached == 0
    assert counts(reader.url)["resumes"]["size" if kind == "huge" else "unreadable"] == 1


# -- tokens, exactly ---------------------------------------------------------------------------------------------------


class Replica:
    """An engine and its session store, without HTTP, so that token ids can be compared."""

    def __init__(self, model: LoadedModel, directory: Path | None, **config: Any) -> None:
        clock = MonotonicClock()
        self.config = EngineConfig(**{"num_blocks": 512, "max_model_len": 2048, **config})
        telemetry = Telemetry(
            "tiny", executor="torch", virtual=False, device="cpu", kv_dtype=self.config.kv_dtype, clock=clock.now
        )
        executor = TorchExecutor(model, self.config, telemetry, clock=clock)
        self.thread = EngineThread(Engine(self.config, executor, telemetry))
        self.sessions = None if directory is None else self._store(model, directory)

    def _store(self, model: LoadedModel, directory: Path) -> SessionStore:
        return SessionStore(
            directory,
            self.thread.engine,
            model=model.name,
            fingerprint=weights_fingerprint(model),
            kv_scheme=self.config.kv_dtype,
            max_bytes=1 << 30,
        )

    def __enter__(self) -> Replica:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.sessions is not None:
            self.sessions.close()
        self.thread.engine.call(self.thread.engine.check_integrity).result(5)
        self.thread.stop()

    def turn(self, prompt: list[int], params: SamplingParams) -> Request:
        """One turn of the only session, from its snapshot if there is one, to its next snapshot."""
        if self.sessions is not None:
            asyncio.run(self.sessions.resume("s", prompt))
        ended = threading.Event()
        request = Request(
            "r", prompt, params, on_token=lambda request, token, outcome: ended.set() if outcome else None
        )
        self.thread.engine.add(request)
        assert ended.wait(30)
        if self.sessions is not None:
            before = sum(self.sessions.counts["saves"].values())
            self.sessions.save("s", [*prompt, *request.output])
            deadline = time.monotonic() + 10
            while sum(self.sessions.counts["saves"].values()) == before and time.monotonic() < deadline:
                time.sleep(0.002)
        return request


@settings(max_examples=6, deadline=None)
@given(
    first=st.integers(1, 300),
    more=st.integers(0, 40),
    generate=st.integers(1, 60),
    temperature=st.sampled_from([0.0, 0.8]),
    block_size=st.sampled_from([4, 16]),
    kv_dtype=st.sampled_from(["auto", "int8"]),
    call_bytes=st.sampled_from([1, 20_000, 1 << 25]),
    seed=st.integers(0, 2**32),
)
def test_token_ids_after_a_move_are_those_of_a_session_that_stayed(
    tmp_path_factory: pytest.TempPathFactory,
    first: int,
    more: int,
    generate: int,
    temperature: float,
    block_size: int,
    kv_dtype: str,
    call_bytes: int,
    seed: int,
) -> None:
    """However many calls of the engine's thread it takes to copy the blocks."""
    model, directory = load_model("tiny"), tmp_path_factory.mktemp("moves")
    rng = np.random.default_rng(seed)
    params = SamplingParams(max_tokens=generate, temperature=temperature, seed=seed)
    config = {"block_size": block_size, "kv_dtype": kv_dtype}
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(sessions, "_CALL_BYTES", call_bytes)
        alone, a, b = (stack.enter_context(Replica(model, where, **config)) for where in (None, directory, directory))
        prompt = rng.integers(0, 256, first).tolist()
        for replica in (a, b, a):
            stayed, moved = alone.turn(prompt, params), replica.turn(prompt, params)
            assert moved.output == stayed.output
            assert moved.num_cached == stayed.num_cached  # the snapshot brings all that a replica could have kept
            prompt = [*prompt, *moved.output, *rng.integers(0, 256, more).tolist()]


def test_a_session_is_taken_up_where_there_is_no_room_for_it(tmp_path: Path) -> None:
    model = load_model("tiny")
    prompt = np.random.default_rng(1).integers(0, 256, 1000).tolist()
    params = SamplingParams(max_tokens=8)
    with Replica(model, tmp_path) as large:
        expected = large.turn(prompt, params).output
    with Replica(model, tmp_path, num_blocks=64, max_model_len=1024, max_queued=8) as small:
        held = Request("held", list(range(250)) * 2, SamplingParams(max_tokens=100, ignore_eos=True))
        small.thread.engine.add(held)  # keeps most of the pool
        assert small.turn(prompt, params).output == expected


# -- the directory ------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from(["write", "read"]), st.integers(0, 9), st.integers(1, 40)), max_size=40)
)
def test_the_directory_keeps_the_files_used_last(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]
) -> None:
    """Compared with a list in order of use."""
    directory = SnapshotDirectory(tmp_path_factory.mktemp("lru"), max_bytes=100)
    kept: dict[str, int] = {}
    for action, number, size in steps:
        name = file_name(str(number))
        if action == "write":
            kept.pop(name, None)
            kept[name] = size
            directory.write(name, bytes(size))
            while sum(kept.values()) > 100:
                del kept[next(iter(kept))]
        elif name in kept:
            data, stamp = directory.read(name, 100)
            assert len(data) == kept[name]
            assert stamp == directory.stamp(name)
            kept[name] = kept.pop(name)
        assert {path.name: path.stat().st_size for path in directory.path.iterdir()} == kept


def test_names_say_nothing_of_the_session_and_files_are_private(tmp_path: Path) -> None:
    directory = SnapshotDirectory(tmp_path / "deep" / "down", max_bytes=1 << 20)
    for session in ("../../escape", "a/b", "\0", "x" * 256, "\ud800", "\N{SNOWMAN}"):
        directory.write(file_name(session), b"x")
    files = list(directory.path.iterdir())
    assert len(files) == 6
    assert all(re.fullmatch(r"[0-9a-f]{32}\.kvsnap", path.name) for path in files)
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700


def test_what_a_dead_writer_left_is_cleared_away(tmp_path: Path) -> None:
    directory = SnapshotDirectory(tmp_path, max_bytes=1000)
    for name, age in (("old", 4000), ("new", 10)):
        path = tmp_path / f".{name}.tmp"
        path.touch()
        now = path.stat().st_mtime
        os.utime(path, (now - age, now - age))
    (tmp_path / "notes.txt").write_text("x" * 2000)  # not ours: neither counted nor removed
    directory.write(file_name("s"), bytes(900))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([".new.tmp", "notes.txt", file_name("s")])


def test_a_directory_that_cannot_be_used_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file"):
        SnapshotDirectory(tmp_path / "file", max_bytes=1)


@pytest.mark.parametrize(
    ("options", "words"), [(["--snapshot-max-bytes", "lots"], "512MiB"), (["--snapshot-dir", "/dev/null"], "/dev/null")]
)
def test_bad_settings_are_told_with_a_next_step(options: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        root(["serve", "tiny", "--port", "0", *options], standalone_mode=False)
    assert words in str(raised.value)
    assert raised.value.next_step


def test_fingerprints_tell_weights_apart_that_share_a_name() -> None:
    one, same, other = load_model("tiny"), load_model("tiny"), load_model("tiny")
    other.model.layers[2].down[:, 5] += 0.01
    prints = [weights_fingerprint(model) for model in (one, same, other)]
    assert prints[0] == prints[1]
    assert prints[2] != prints[0]


def test_without_a_prefix_cache_there_is_nothing_to_resume_with(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="prefix cache"):
        Replica(load_model("tiny"), tmp_path, prefix_caching=False)


# -- fields of a request ------------------------------------------------------------------------------------------------


def refused(server: RunningServer, headers: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1, **fields}
    answer = HTTP.post(server.url + "/v1/completions", json=body, headers=headers)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def test_bad_session_fields_are_400_and_named(undisturbed: RunningServer) -> None:
    assert refused(undisturbed, session_id="x" * 257)["param"] == "session_id"
    assert refused(undisturbed, session_id=7)["param"] == "session_id"
    assert refused(undisturbed, {"X-Session-ID": "x" * 257})["param"] == "session_id"
    assert refused(undisturbed, {"X-Tenant": "x" * 129})["param"] == "X-Tenant"
    for seconds in (0, -1, "soon"):
        assert refused(undisturbed, deadline_seconds=seconds)["param"] == "deadline_seconds"
    raw = b'{"model": "tiny", "prompt": "x", "deadline_seconds": 1e999}'
    answer = HTTP.post(undisturbed.url + "/v1/completions", content=raw, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "deadline_seconds")


def test_the_header_names_the_session_before_the_body(reader: RunningServer, tmp_path: Path) -> None:
    body = {"model": "tiny", "prompt": HISTORY, "max_tokens": 2, "session_id": "body"}
    headers = {"X-Session-ID": "header"}
    HTTP.post(reader.url + "/v1/completions", json=body, headers=headers).raise_for_status()
    wait_written(reader.url, 1)
    assert [path.name for path in tmp_path.iterdir()] == [file_name("header")]


def test_a_deadline_before_the_first_token_is_an_error_that_clients_do_not_repeat(undisturbed: RunningServer) -> None:
    client = undisturbed.client(max_retries=2)
    before = undisturbed.books().ended["deadline"]
    with pytest.raises(openai.APIStatusError) as raised:
        client.completions.create(model="tiny", prompt=HISTORY, extra_body={"deadline_seconds": 1e-6})
    assert (raised.value.status_code, raised.value.code) == (504, "deadline_exceeded")
    undisturbed.wait_idle()
    assert undisturbed.books().ended["deadline"] == before + 1
    with pytest.raises(openai.APIError, match="deadline"):
        list(client.completions.create(model="tiny", prompt="x", stream=True, extra_body={"deadline_seconds": 1e-6}))


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_in_the_middle_ends_the_text_and_says_so(undisturbed: RunningServer, stream: bool) -> None:
    answer = undisturbed.client().completions.create(
        model="tiny",
        prompt="x",
        max_tokens=4000,
        stream=stream,
        extra_body={"deadline_seconds": 1.0, "ignore_eos": True},
    )
    choices = [event.choices[0] for event in answer] if stream else [answer.choices[0]]
    assert choices[-1].finish_reason == "deadline"
    assert "".join(choice.text for choice in choices)
    assert stream or 0 < answer.usage.completion_tokens < 4000
