"""`kvscope gpu`: health of this host's GPUs at /metrics, beside any engine. `kvscope serve` has the same families by itself."""

from __future__ import annotations

from typing import Annotated

import typer

from observability.cli._tls import TlsCert, TlsKey
from observability.cli.record import parse_interval
from observability.cli.serve import is_loopback
from observability.errors import ConfigError
from observability.tls import Tls


def register(app: typer.Typer) -> None:
    app.command()(gpu)


def gpu(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 9401,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="KVSCOPE_TOKEN", help="Scrapers must send this as `Authorization: Bearer`.", show_default=False
        ),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow an address that other machines reach, without a token.")
    ] = False,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    dcgm: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Read from the /metrics of a DCGM-exporter in place of NVML.", show_default=False
        ),
    ] = None,
    interval: Annotated[str, typer.Option(help="Time between readings, such as 5s.")] = "5s",
) -> None:
    """Serve the health of this host's GPUs as Prometheus metrics, for engines that are not kvscope's. Ctrl-C ends it.

    Examples:

        kvscope gpu

        kvscope gpu --dcgm http://127.0.0.1:9400/metrics --port 9402

        KVSCOPE_TOKEN=secret kvscope gpu --host 0.0.0.0
    """
    import signal
    import threading

    from exporters.gpu.dcgm import DcgmSource
    from exporters.gpu.nvml import NvmlSource
    from exporters.gpu.sampler import GpuSampler
    from exporters.prometheus import start_exporter

    token = (token or "").strip() or None
    if token is None and not insecure and not is_loopback(host):
        raise ConfigError(
            f"{host} can be reached from other machines, and no token is set.",
            next_step="Set KVSCOPE_TOKEN, listen on 127.0.0.1, or give --insecure.",
        )
    tls = Tls.of(tls_cert, tls_key)
    source = NvmlSource() if dcgm is None else DcgmSource(dcgm)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    sampler = GpuSampler(source, interval=parse_interval(interval), on_change=tell)
    with start_exporter(sampler, host, port, token=token, tls=tls) as exporter:
        typer.echo(f"GPU metrics at {exporter.url}; Ctrl-C ends it.")
        sampler.start()
        stop.wait()
        sampler.stop()


def tell(message: str) -> None:
    """Says on standard error that there are GPUs to read (""), or why not."""
    typer.echo(f"No GPU metrics: {message}" if message else "GPU metrics are being read.", err=True)
