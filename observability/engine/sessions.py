"""Sessions that outlive their replica: after each turn the KV prefix of a session goes to a snapshot file in a directory that replicas
share; a replica that lacks the prefix takes it from there. A snapshot only ever saves work: whatever is wrong with one, the
request is computed from its tokens.

end of a turn -> SessionStore.save() -> engine thread: export -> writer thread: dump, rename into place
next turn -> SessionStore.resume() -> worker thread: read, check -> engine thread: import -> the request hits the prefix
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import os
import stat
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from observability.catalog import SESSION_RESUMES, SESSION_SAVES
from observability.engine.kv import snapshot as format
from observability.engine.kv.prefix import Keys, TokenKeys
from observability.engine.kv.snapshot import Snapshot, SnapshotError
from observability.errors import ConfigError, ServiceError

if TYPE_CHECKING:
    from observability.engine.engine import Engine
    from observability.engine.model.loading import LoadedModel
    from observability.engine.types import Payload

_log = logging.getLogger(__name__)
T = TypeVar("T")

#: What became of a turn's snapshot. unchanged: the file holds the prefix already; nothing: no full block of it is cached any more.
SAVES = SESSION_SAVES
#: How a turn of a session began. From "unreadable" on a snapshot was refused.
RESUMES = SESSION_RESUMES

_EXPORT_BYTES = 256 << 20  # of KV in one snapshot; a longer session keeps its first tokens
_LOAD_BYTES = 2 * _EXPORT_BYTES + (1 << 20)  # 4-bit integers travel as 8-bit ones; and the tokens
_CALL_BYTES = 32 << 20  # of KV that the engine's thread copies between two steps
_ENGINE_SECONDS = 10.0  # to wait for the engine's thread, which may be in a long step
_MAX_PENDING = 64  # sessions that wait to be written, and resumes under way
_MAX_KNOWN = 4096  # snapshots whose content is remembered
_STALE_SECONDS = 3600.0  # after which a temporary file has no writer any more
_SUFFIX = ".kvsnap"


def weights_fingerprint(loaded: LoadedModel) -> str:
    """Tells models apart that share a name: the configuration, and type, shape and 256 evenly spaced elements of each weight."""
    digest = hashlib.blake2b(repr(loaded.config).encode(), digest_size=16)
    for name, tensor in _weights(loaded.model):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        count = min(tensor.numel(), 256)
        flat = torch.arange(count, device=tensor.device) * (tensor.numel() - 1) // max(count - 1, 1)
        digest.update(tensor[torch.unravel_index(flat, tensor.shape)].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    for name, value in vars(model).items():
        if isinstance(value, Tensor) and not name.startswith("_"):
            yield name, value
    for i, layer in enumerate(model.layers):
        for field in dataclasses.fields(layer):
            value = getattr(layer, field.name)
            if isinstance(value, Tensor):
                yield f"{i}.{field.name}", value


def file_name(session_id: str) -> str:
    """Of a session's snapshot. Nothing of the id itself, which may hold any characters and be private."""
    return hashlib.blake2b(session_id.encode(errors="surrogatepass"), digest_size=16).hexdigest() + _SUFFIX


@dataclass(frozen=True, slots=True)
class Stamp:
    """Which version of a file was seen. Reading leaves it alone; another replica's version has another one."""

    modified_ns: int
    size: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        return cls(status.st_mtime_ns, status.st_size)


class SnapshotDirectory:
    """Snapshot files of a directory that several processes write to; together at most `max_bytes`, those used last.

    Raises ConfigError when the directory cannot be made or written to. Its files hold what users wrote, so only their owner may
    read them, and whoever may write there can make a model say anything.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path, self.max_bytes = path, max_bytes
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = self._temporary("probe")
            os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"Snapshots cannot be kept in {path}: {error.strerror or error}.",
                next_step="Give a directory that this user may write to.",
            ) from error

    def _temporary(self, name: str) -> Path:
        return self.path / f".{name}.{uuid.uuid4().hex}.tmp"

    def stamp(self, name: str) -> Stamp | None:
        """None when there is no such file. Raises OSError."""
        try:
            return Stamp.of(os.lstat(self.path / name))
        except FileNotFoundError:
            return None

    def read(self, name: str, max_bytes: int) -> tuple[bytes, Stamp]:
        """Content of a file, which counts as used now. Raises OSError, also for what is no plain file, and SnapshotError when it is
        too large."""
        # O_NONBLOCK: what another user put there (a pipe) must not hold this thread
        with open(os.open(self.path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise OSError(f"{name} is no plain file")
            if status.st_size > max_bytes:
                raise SnapshotError(f"The snapshot has {status.st_size} bytes, more than {max_bytes}.", part="size")
            with contextlib.suppress(OSError):  # a directory that may only be read from does as well
                os.utime(file.fileno(), ns=(time.time_ns(), status.st_mtime_ns))
            return file.read(max_bytes), Stamp.of(status)

    def write(self, name: str, data: bytes) -> Stamp:
        """Puts `data` in place of the file at once, and drops the files used least lately. Raises OSError.

        Not synced to disk: a snapshot that a power failure cut short is refused by its checksum.
        """
        temporary = self._temporary(name)
        try:
            with open(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(data)
                file.flush()
                now = time.time_ns()  # exact; the file system's own times may have ticks of milliseconds
                os.utime(file.fileno(), ns=(now, now))
                stamp = Stamp.of(os.fstat(file.fileno()))
            os.replace(temporary, self.path / name)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self._shrink(keep=name)
        return stamp

    def _shrink(self, keep: str) -> None:
        files: list[tuple[int, int, str]] = []
        total, now = 0, time.time_ns()
        for entry in os.scandir(self.path):
            ours = entry.name.endswith(_SUFFIX)
            if not ours and not (entry.name.startswith(".") and entry.name.endswith(".tmp")):
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # another replica was faster
            used = max(status.st_atime_ns, status.st_mtime_ns)
            if ours:
                total += status.st_size
                files.append((used, status.st_size, entry.name))
            elif now - used > _STALE_SECONDS * 1e9:
                (self.path / entry.name).unlink(missing_ok=True)
        for _, size, name in sorted(files):
            if total <= self.max_bytes:
                return
            if name != keep:
                (self.path / name).unlink(missing_ok=True)
                total -= size


@dataclass(frozen=True, slots=True)
class _Known:
    """What a version of a snapshot holds, so that it need not be read to know that it has nothing new."""

    stamp: Stamp
    keys: Keys  # of its blocks


def _check_content(snapshot: Snapshot) -> None:
    """Raises SnapshotError unless there are numbers, all finite: one that is not would spread to every request that shares the prefix."""
    if not snapshot.tensors:
        raise SnapshotError("The snapshot holds no KV.", part="content")
    for name, tensor in snapshot.tensors.items():
        if tensor.dtype == np.uint16:  # bfloat16 by its bits
            finite = bool(((tensor & 0x7F80) != 0x7F80).all())
        else:
            finite = tensor.dtype.kind != "f" or bool(np.isfinite(tensor).all())
        if not finite:
            raise SnapshotError(f"Tensor {name} of the snapshot holds numbers that are not finite.", part="content")


class SessionStore:
    """Snapshots of the sessions that `engine` serves. Starts its threads at once; close() ends them.

    `counts["saves"]` and `counts["resumes"]` say how often each of SAVES and RESUMES happened, `counts["tokens"]` how many tokens were
    imported. Raises ConfigError when the engine caches no prefixes or the directory cannot be used.
    """

    def __init__(
        self,
        directory: Path,
        engine: Engine,
        *,
        model: str,
        fingerprint: str,
        kv_scheme: str,
        max_bytes: int,
    ) -> None:
        if not engine.config.prefix_caching:
            raise ConfigError(
                "Snapshots resume sessions through the prefix cache, which is off.",
                next_step="Serve without --snapshot-dir, or a model and settings with prefix caching.",
            )
        self._directory = SnapshotDirectory(directory, max_bytes)
        self._engine = engine
        self._block_size = engine.config.block_size
        self._model, self._fingerprint, self._kv_scheme = model, fingerprint, kv_scheme
        self._block_bytes = engine.executor.kv_bytes_per_block
        self.counts: dict[str, dict[str, int]] = {
            "saves": dict.fromkeys(SAVES, 0),
            "resumes": dict.fromkeys(RESUMES, 0),
            "tokens": {"imported": 0},
        }
        engine.telemetry.mechanisms.expect(sessions=True)
        self._logged: set[str] = set()
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._lock = threading.Lock()  # of counts, _logged and _known
        self._pending: OrderedDict[str, list[int]] = OrderedDict()
        self._changed = threading.Condition()  # of _pending and _closed
        self._closed = False
        self._resuming = 0  # event loop only
        self._workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="resume")
        self._writer = threading.Thread(target=self._write_all, name="snapshots", daemon=True)
        self._writer.start()

    def close(self, seconds: float = 5.0) -> None:
        """Writes what is pending, for at most `seconds`, and ends the threads. To be called before the engine stops."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._writer.join(seconds)
        self._workers.shutdown(wait=False, cancel_futures=True)

    # -- after a turn ------------------------------------------------------------------------------------------------

    def save(self, session_id: str, tokens: Sequence[int]) -> None:
        """Has the KV of a session's tokens (prompt and output) written soon. Never waits; a session has one write queued at most, of
        its latest turn."""
        name = file_name(session_id)
        with self._changed:
            if self._closed:
                return
            full = name not in self._pending and len(self._pending) >= _MAX_PENDING
            if not full:
                self._pending[name] = list(tokens)
                self._changed.notify()
        if full:
            self._count("saves", "busy")

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closed)
                if not self._pending:
                    return
                name, tokens = self._pending.popitem(last=False)
            try:
                outcome = self._write(name, tokens)
            except (OSError, ServiceError, TimeoutError, SnapshotError) as error:
                outcome = "failed"
                self._log_once("save", f"A session's snapshot could not be written: {error}")
            except Exception:  # the next session must not pay for it
                outcome = "failed"
                _log.exception("writing a session's snapshot failed")
            self._count("saves", outcome)

    def _write(self, name: str, tokens: list[int]) -> str:
        size = self._block_size
        # the last token has no KV yet
        blocks = min(max(len(tokens) - 1, 0) // size, max(_EXPORT_BYTES // self._block_bytes, 1))
        if not blocks:
            return "nothing"
        del tokens[blocks * size :]
        keys = TokenKeys(tokens, [], size).get(0, blocks)
        known = self._known_now(name)
        if known is not None and _common(known.keys, keys) == blocks:
            return "unchanged"
        blocks, payload = self._export(keys)
        if not blocks or (known is not None and _common(known.keys, keys[:blocks]) == blocks):
            return "unchanged" if blocks else "nothing"
        data = format.dump(
            Snapshot(
                model=self._model,
                fingerprint=self._fingerprint,
                kv_scheme=self._kv_scheme,
                block_size=size,
                tokens=np.array(tokens[: blocks * size], np.int32),
                metadata={},
                tensors=payload,
            )
        )
        if len(data) > self._directory.max_bytes:
            return "too_large"
        self._remember(name, _Known(self._directory.write(name, data), keys[:blocks]))
        return "written"

    def _export(self, keys: Keys) -> tuple[int, Payload]:
        """How many leading blocks of a sequence are cached, and their content; slice by slice, so that steps go on in between."""
        parts: list[Payload] = []
        blocks, step = 0, max(_CALL_BYTES // self._block_bytes, 1)
        while blocks < len(keys) and blocks % step == 0:
            count, part = self._on_engine(partial(self._engine.kv.export_prefix, keys[blocks : blocks + step]))
            if not count:
                break
            blocks += count
            parts.append(part)
        return blocks, {name: np.concatenate([part[name] for part in parts]) for name in (parts[0] if parts else ())}

    # -- before a turn -----------------------------------------------------------------------------------------------

    async def resume(self, session_id: str, prompt: Sequence[int]) -> str:
        """Caches the KV of the leading tokens of `prompt` from the session's snapshot, where that has more of them than this replica.

        Returns what happened, one of RESUMES. The request can be served in any case.
        """
        if self._resuming >= _MAX_PENDING:
            return self._count("resumes", "busy")
        self._resuming += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._workers, self._resume, session_id, prompt)
        finally:
            self._resuming -= 1

    def _resume(self, session_id: str, prompt: Sequence[int]) -> str:
        try:
            outcome = self._import(file_name(session_id), prompt)
        except FileNotFoundError:
            outcome = "missing"
        except SnapshotError as error:
            outcome = error.part
            self._log_once(outcome, f"A session's snapshot was refused, its prefix is computed again: {error.reason}")
        except ValueError as error:  # import_prefix: arrays that are not those of this engine's blocks
            outcome = "content"
            self._log_once(outcome, f"A session's snapshot does not fit the engine: {error}")
        except OSError as error:
            outcome = "unreadable"
            self._log_once(outcome, f"A session's snapshot cannot be read: {error}")
        except (ServiceError, TimeoutError) as error:
            outcome = "engine"
            self._log_once(outcome, f"A session could not be resumed: {error or 'the engine is in a long step'}")
        except Exception:  # the request can be computed all the same
            outcome = "engine"
            _log.exception("resuming a session failed")
        return self._count("resumes", outcome)

    def _import(self, name: str, prompt: Sequence[int]) -> str:
        size = self._block_size
        known = self._known_now(name)
        if known is None and self._directory.stamp(name) is None:
            return "missing"
        wanted = TokenKeys(prompt, [], size).get(
            0, max(len(prompt) - 1, 0) // size
        )  # the last token is always computed
        cached = self._on_engine(partial(self._engine.kv.cached_blocks, wanted))
        if cached == len(wanted):
            return "cached"
        if known is not None and (common := _common(known.keys, wanted)) <= cached:
            return "cached" if common else "diverged"
        data, stamp = self._directory.read(name, _LOAD_BYTES)
        snapshot = format.load(data, max_bytes=_LOAD_BYTES)
        del data
        format.check(
            snapshot, model=self._model, fingerprint=self._fingerprint, kv_scheme=self._kv_scheme, block_size=size
        )
        _check_content(snapshot)
        tokens = snapshot.tokens.tolist()
        keys = TokenKeys(tokens, [], size).get(0, len(tokens) // size)
        self._remember(name, _Known(stamp, keys))
        common = _common(keys, wanted)
        if common <= cached:
            return "cached" if common else "diverged"
        step, end, stored = max(_CALL_BYTES // self._block_bytes, 1), cached, cached
        while end < common and stored == end:
            end = min(end + step, common)
            payload = {name: tensor[:end] for name, tensor in snapshot.tensors.items()}
            stored = self._on_engine(partial(self._engine.kv.import_prefix, wanted[:end], payload))
        if stored <= cached:
            return "no_room"
        with self._lock:
            self.counts["tokens"]["imported"] += (stored - cached) * size
            self._engine.telemetry.mechanisms.session_imported((stored - cached) * size)
        return "imported"

    # -- both --------------------------------------------------------------------------------------------------------

    def _on_engine(self, work: Callable[[], T]) -> T:
        return self._engine.call(work).result(_ENGINE_SECONDS)

    def _known_now(self, name: str) -> _Known | None:
        """What the file holds now, if this process has seen this version of it."""
        with self._lock:
            known = self._known.get(name)
        return known if known is not None and known.stamp == self._directory.stamp(name) else None

    def _remember(self, name: str, known: _Known) -> None:
        with self._lock:
            self._known[name] = known
            self._known.move_to_end(name)
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)

    def _count(self, kind: str, outcome: str) -> str:
        with self._lock:
            self.counts[kind][outcome] += 1
            mechanisms = self._engine.telemetry.mechanisms
            (mechanisms.session_saved if kind == "saves" else mechanisms.session_resumed)(outcome)
        return outcome

    def _log_once(self, reason: str, text: str) -> None:
        with self._lock:
            first = reason not in self._logged
            self._logged.add(reason)
        if first:
            _log.warning("%s (told once; /health counts all)", text)


def _common(a: Keys, b: Keys) -> int:
    """How many leading keys agree."""
    shorter = min(len(a), len(b))
    different = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(different[0]) if different.size else shorter
