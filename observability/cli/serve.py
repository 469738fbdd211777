"""`kvscope serve`: the bundled engine behind an OpenAI-compatible server, with its metrics endpoint."""

from __future__ import annotations

import contextlib
import gc
import ipaddress
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from observability.buckets import BucketPlan, bucket_plan
from observability.cli._tls import TlsCert, TlsKey
from observability.errors import ConfigError
from observability.tls import Tls, scheme

if TYPE_CHECKING:
    import socket

    from exporters.otlp import HistogramForm, Otlp
    from exporters.together import Source
    from observability.engine.engine import Engine
    from observability.engine.model.loading import LoadedModel
    from observability.engine.server import ServerSettings
    from observability.engine.types import EngineConfig
    from observability.telemetry.recorder import Telemetry

_DEFAULT_BLOCKS = 1024
_DEFAULT_MAX_CONTEXT = 8192
_SERVER, _KV, _BATCHING, _SESSIONS, _MECHANISMS = "Server", "KV cache", "Batching", "Sessions", "Mechanisms"
_METRICS = "Metrics"
_OPENTELEMETRY = "OpenTelemetry"
#: Engine settings that have an option of their own.
_OPTIONS = (
    "block_size",
    "num_blocks",
    "kv_dtype",
    "contiguous_below",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_queued",
)


def register(app: typer.Typer) -> None:
    app.command()(serve)


def serve(
    model: Annotated[
        str, typer.Argument(help="smollm2-135m, tiny, or the path of a Llama directory or GGUF file.")
    ] = "smollm2-135m",
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=_SERVER)] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.", rich_help_panel=_SERVER)
    ] = 8000,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="KVSCOPE_TOKEN",
            help="Clients must send this as `Authorization: Bearer`. Give it by the variable: others can read a command line.",
            rich_help_panel=_SERVER,
            show_default=False,
        ),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", help="Allow an address that other machines reach, without a token.", rich_help_panel=_SERVER
        ),
    ] = False,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    grace: Annotated[
        float,
        typer.Option(
            min=0.0, max=3600.0, help="Seconds that running requests get at shutdown.", rich_help_panel=_SERVER
        ),
    ] = 10.0,
    device: Annotated[str, typer.Option(help="cpu, or cuda.", rich_help_panel=_SERVER)] = "cpu",
    kv_blocks: Annotated[
        int | None,
        typer.Option(min=1, help="Blocks in the KV pool. Default: 1024.", rich_help_panel=_KV, show_default=False),
    ] = None,
    kv_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Size of the KV pool, such as 512MiB; instead of --kv-blocks.", rich_help_panel=_KV
        ),
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens a KV block holds.", rich_help_panel=_KV)] = 16,
    kv_dtype: Annotated[
        Literal["auto", "int8"], typer.Option(help="int8 stores keys and values quantized.", rich_help_panel=_KV)
    ] = "auto",
    contiguous_below: Annotated[
        int,
        typer.Option(
            min=0, help="Sequences meant to stay below this many tokens take adjacent blocks.", rich_help_panel=_KV
        ),
    ] = 2048,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Longest prompt and answer together, in tokens. Default: what model and KV pool allow, at most 8192.",
            rich_help_panel=_BATCHING,
            show_default=False,
        ),
    ] = None,
    max_num_seqs: Annotated[
        int, typer.Option(min=1, help="Requests that run at once.", rich_help_panel=_BATCHING)
    ] = 32,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of one step, prefill and decode together.", rich_help_panel=_BATCHING)
    ] = 2048,
    max_queued: Annotated[
        int, typer.Option(min=1, help="Requests that may wait; more are refused with 429.", rich_help_panel=_BATCHING)
    ] = 256,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="A mechanism of the engine, such as num_host_blocks=4096, compaction_seconds=0.002, controller=on or controller.p99_high_seconds=1.5; may be given more than once. docs/engine.md lists them.",
            rich_help_panel=_MECHANISMS,
            show_default=False,
        ),
    ] = None,
    buckets: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SECONDS,...",
            envvar="KVSCOPE_BUCKETS",
            help="Bucket bounds of latency, inter_token or tail (the make-up of slow requests) in place of the default ones; may be given more than once. Thresholds of objectives are added. Every replica of a model needs the same.",
            rich_help_panel=_METRICS,
            show_default=False,
        ),
    ] = None,
    max_tenants: Annotated[
        int,
        typer.Option(
            min=0,
            max=1000,
            help="Tenants with metrics of their own, first come; the others share tenant `other`. 0: no metrics by tenant.",
            rich_help_panel=_METRICS,
        ),
    ] = 20,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Serve metrics on this port too, from a process of their own: its scrapes do not touch the engine's steps.",
            rich_help_panel=_METRICS,
            show_default=False,
        ),
    ] = None,
    profile_to: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="KVSCOPE_PROFILE_TO",
            help="Send CPU profiles to this Pyroscope server, 100 samples a second, tagged by phase.",
            rich_help_panel=_METRICS,
            show_default=False,
        ),
    ] = None,
    snapshot_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIRECTORY",
            help="Keep the KV of sessions here after each turn, so that another replica with the same directory can go on with them.",
            rich_help_panel=_SESSIONS,
            show_default=False,
        ),
    ] = None,
    snapshot_max_bytes: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Most that the files there take, such as 4GiB; snapshots used least lately go first.",
            rich_help_panel=_SESSIONS,
        ),
    ] = "4GiB",
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="OTEL_EXPORTER_OTLP_ENDPOINT",
            help="Send spans and metrics to the OpenTelemetry collector there, such as http://127.0.0.1:4318. Other OTEL_ variables hold too.",
            rich_help_panel=_OPENTELEMETRY,
            show_default=False,
        ),
    ] = None,
    otlp_histograms: Annotated[
        Literal["advised", "extended", "exponential"],
        typer.Option(
            envvar="KVSCOPE_OTLP_HISTOGRAMS",
            help="Buckets of what is sent: the GenAI conventions' bounds, kvscope's up to 640 s, or exponential ones (native in Prometheus).",
            rich_help_panel=_OPENTELEMETRY,
        ),
    ] = "advised",
) -> None:
    """Serve a model over an OpenAI-compatible API, with Prometheus metrics at /metrics.

    A request chooses its priority class by the header `x-kvscope-class` (interactive, standard, long_context), by
    `service_tier` (priority, default, flex) or by `priority` (below 0, 0, above 0). It names its session by the header
    `X-Session-ID` or by `session_id`, its tenant by the header `X-Tenant`, and may set `deadline_seconds`.

    Examples:

        kvscope serve

        kvscope serve ~/models/Llama-3.2-1B-Instruct --kv-memory 4GiB --kv-dtype int8

        KVSCOPE_TOKEN=secret kvscope serve --host 0.0.0.0 --port 8080

        kvscope serve --port 8001 --snapshot-dir /var/lib/kvscope/sessions

        kvscope serve --engine num_host_blocks=4096 --engine compaction_seconds=0.002 --engine controller=on

        kvscope serve tiny-mla --engine prefix_caching=off

        kvscope serve --metrics-port 9400

        kvscope serve --profile-to http://127.0.0.1:4040

        kvscope serve --buckets latency=0.1,0.2,0.4,0.8,1.6,3.2,6.4 --buckets tail=0.8,1.6,3.2

        kvscope serve --otlp-endpoint http://127.0.0.1:4318 --otlp-histograms exponential
    """
    token = (token or "").strip() or None
    if token is None and not insecure and not is_loopback(host):
        raise ConfigError(
            f"{host} can be reached from other machines, and no token is set.",
            next_step="Set KVSCOPE_TOKEN, listen on 127.0.0.1, or give --insecure.",
        )
    if kv_blocks is not None and kv_memory is not None:
        raise ConfigError("--kv-blocks and --kv-memory both set the size of the pool.", next_step="Give one of them.")
    tls = Tls.of(tls_cert, tls_key)
    memory = None if kv_memory is None else _bytes("--kv-memory", kv_memory)
    snapshot_bytes = _bytes("--snapshot-max-bytes", snapshot_max_bytes)
    mechanisms = _mechanisms(engine or [])
    plan = bucket_plan(buckets or [])

    from observability.engine.http_server import listen
    from observability.engine.server import ServerSettings
    from observability.engine.types import EngineConfig

    config = EngineConfig(
        block_size=block_size,
        num_blocks=_DEFAULT_BLOCKS if kv_blocks is None else kv_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=1,  # until the model and the pool are known, see _fit
        max_queued=max_queued,
        contiguous_below=contiguous_below,
        kv_dtype=kv_dtype,
    )
    with contextlib.ExitStack() as listeners:
        listener = listeners.enter_context(listen(host, port))
        metrics_listener = None if metrics_port is None else listeners.enter_context(listen(host, metrics_port))
        from rich.console import Console

        with Console(stderr=True).status(f"Loading {model} on {device} ..."):
            from observability.engine.model.loading import load_model

            loaded = load_model(model, device=device)
            config = _fit(config, loaded, memory, max_model_len, mechanisms)
        settings = ServerSettings(token=token, grace_seconds=grace)
        told = metrics_listener, profile_to, otlp_endpoint, otlp_histograms
        _run(loaded, config, settings, plan, max_tenants, listener, snapshot_dir, snapshot_bytes, tls, *told)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bytes(option: str, size: str) -> int:
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return int(TypeAdapter(ByteSize).validate_python(size))
    except ValidationError:
        raise ConfigError(
            f"{option} {size!r} is not a size.", next_step="Give a number and a unit, such as 512MiB."
        ) from None


def _mechanisms(pairs: list[str]) -> dict[str, Any]:
    from observability.engine.settings import parse_settings

    settings = parse_settings(pairs)
    for name in _OPTIONS:
        if name in settings:
            option = "--kv-blocks" if name == "num_blocks" else "--" + name.replace("_", "-")
            raise ConfigError(f"--engine {name} has an option of its own.", next_step=f"Use {option}.")
    return settings


def _fit(
    config: EngineConfig,
    loaded: LoadedModel,
    memory: int | None,
    max_model_len: int | None,
    mechanisms: dict[str, Any],
) -> EngineConfig:
    """`config` with its mechanisms, as many blocks as `memory` bytes hold (None: as it is) and the context that model and pool allow."""
    from observability.engine.executor.torch_executor import TorchExecutor

    if memory is not None:
        small = replace(config, num_blocks=1, max_num_seqs=1, prefix_caching=mechanisms.get("prefix_caching", True))
        probe = TorchExecutor(loaded, small, None)
        room = memory - config.max_num_seqs * probe.kv_fixed_bytes_per_sequence
        if room < probe.kv_bytes_per_block:
            raise ConfigError(
                f"--kv-memory of {memory} bytes holds no block beside {memory - room} bytes that {config.max_num_seqs} sequences "
                f"take: a block takes {probe.kv_bytes_per_block} bytes.",
                next_step="Give more memory, a smaller --block-size or a smaller --max-num-seqs.",
            )
        config = replace(config, num_blocks=room // probe.kv_bytes_per_block)
    assert config.num_blocks is not None
    blocks = mechanisms.get("num_compressed_blocks") or config.num_blocks  # what a longest sequence lies in
    longest = min(_DEFAULT_MAX_CONTEXT, loaded.config.max_position, blocks * config.block_size)
    return replace(config, max_model_len=longest if max_model_len is None else max_model_len, **mechanisms)


def _run(
    loaded: LoadedModel,
    config: EngineConfig,
    settings: ServerSettings,
    buckets: BucketPlan,
    max_tenants: int,
    listener: socket.socket,
    snapshot_dir: Path | None,
    snapshot_bytes: int,
    tls: Tls | None,
    metrics_listener: socket.socket | None,
    profile_to: str | None,
    otlp_endpoint: str | None,
    otlp_histograms: HistogramForm,
) -> None:
    """Serves on `listener` until SIGINT or SIGTERM; then requests get their grace period and the engine stops."""
    from exporters.gpu.nvml import NvmlSource
    from exporters.gpu.sampler import GpuSampler
    from exporters.process import ExporterProcess
    from exporters.prometheus import metrics_app
    from exporters.together import Together
    from observability.cli.gpu import tell
    from observability.engine.clock import MonotonicClock
    from observability.engine.engine import Engine
    from observability.engine.executor.torch_executor import TorchExecutor
    from observability.engine.http_server import HttpServer
    from observability.engine.loop import EngineThread
    from observability.engine.server import create_app
    from observability.telemetry.recorder import Telemetry
    from observability.telemetry.tracing import Tracing

    clock = MonotonicClock()
    stored = str(loaded.model.dtype).removeprefix("torch.") if config.kv_dtype == "auto" else config.kv_dtype
    device = str(loaded.model.device)
    telemetry = Telemetry(
        loaded.name,
        executor="torch",
        virtual=False,
        device=device,
        kv_dtype=stored,
        clock=clock.now,
        buckets=buckets,
        max_tenants=max_tenants,
    )
    executor = TorchExecutor(loaded, config, telemetry, clock=clock)
    thread = EngineThread(Engine(config, executor, telemetry, loaded.eos_token_ids))
    sessions = None
    if snapshot_dir is not None:
        from observability.engine.sessions import SessionStore, weights_fingerprint

        sessions = SessionStore(
            snapshot_dir,
            thread.engine,
            model=loaded.name,
            fingerprint=weights_fingerprint(loaded),
            kv_scheme=stored,
            max_bytes=snapshot_bytes,
        )
    gpus = GpuSampler(NvmlSource(), on_change=tell)
    told = Together([telemetry, gpus])
    host, port = listener.getsockname()[:2]
    otlp = _start_otlp(telemetry, told, otlp_endpoint, otlp_histograms, port)
    tracing = Tracing.of(
        loaded.name,
        clock.now,
        otlp.tracer_provider if otlp is not None else None,
        otlp.meter_provider if otlp is not None else None,
    )
    app = create_app(thread, loaded, telemetry, settings, metrics_app(told, settings.token), sessions, tracing)
    assert config.num_blocks is not None
    mebibytes = config.num_blocks * executor.kv_bytes_per_block / 2**20
    base = f"{scheme(tls)}://[{host}]:{port}" if ":" in host else f"{scheme(tls)}://{host}:{port}"
    alone = ""
    # What was made so far stays: a full collection, which every thread waits for, need not look through it again and again.
    gc.collect()
    gc.freeze()
    with quiet_signals(), _profiled(thread.engine, profile_to), contextlib.ExitStack() as exporters:
        if metrics_listener is not None:
            exporter = exporters.enter_context(ExporterProcess(told, metrics_listener, settings.token, tls))
            alone = f", {exporter.url}"
        thread.start()
        gpus.start()
        try:
            typer.echo(
                f"{loaded.name} on {device}: context {config.max_model_len} tokens, "
                f"KV pool {config.num_blocks} blocks ({mebibytes:.0f} MiB, {stored})\n"
                f"  API      {base}/v1\n  metrics  {base}/metrics{alone}\n  health   {base}/health\nCtrl-C stops it."
            )
            HttpServer(app, app.state.service, grace_seconds=settings.grace_seconds, tls=tls).run(sockets=[listener])
        finally:
            gpus.stop()
            if sessions is not None:
                sessions.close()
            try:
                thread.stop()
            finally:
                if tracing is not None:
                    tracing.close()
                if otlp is not None:
                    otlp.close()


def _start_otlp(
    telemetry: Telemetry, source: Source, endpoint: str | None, form: HistogramForm, port: int
) -> Otlp | None:
    """None: nobody asked for it. Raises ConfigError when the SDK is not installed."""
    if not endpoint and not any(text for name, text in os.environ.items() if name.startswith("OTEL_EXPORTER_OTLP_")):
        return None  # without loading the SDK
    import logging

    from exporters.otlp import start_otlp, wanted

    logging.getLogger("opentelemetry.exporter").setLevel(logging.ERROR)  # a dead collector: once a push, not once a try
    if not wanted(endpoint):
        return None
    return start_otlp(telemetry, endpoint, source=source, form=form, instance=f"{gethostname()}:{port}")


@contextlib.contextmanager
def _profiled(engine: Engine, url: str | None) -> Iterator[None]:
    """CPU profiles of this process go to `url`, tagged by the engine's phase."""
    if not url:  # also a variable that is set to nothing
        yield
        return
    from exporters.profiles import profiles_to
    from observability.engine.profiling import named, phases

    with profiles_to(url, {"model": engine.telemetry.model}) as tag, named(phases(engine), tag):
        yield


@contextlib.contextmanager
def quiet_signals() -> Iterator[None]:
    """uvicorn ends on SIGINT and SIGTERM and then raises them again for whoever handled them before it: here nobody, so
    that a stop that was asked for is a success, and a second Ctrl-C does not cut the clean-up short."""
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
