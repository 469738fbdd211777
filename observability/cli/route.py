"""`kvscope route`: one address for several replicas of `kvscope serve`, on which sessions stay where their KV is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from observability.cli._tls import TlsCert, TlsKey
from observability.cli.serve import is_loopback, quiet_signals
from observability.errors import ConfigError
from observability.tls import Tls, scheme

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric
    from starlette.requests import Request
    from starlette.responses import Response

    from observability.engine.router import Router


def register(app: typer.Typer) -> None:
    app.command()(route)


def route(
    replica: Annotated[list[str], typer.Option(help="Base URL of a replica; once for each.", show_default=False)],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8080,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", help="Allow an address that other machines reach. The replicas must ask for a token."
        ),
    ] = False,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    grace: Annotated[
        float, typer.Option(min=0.0, max=3600.0, help="Seconds that open requests get at shutdown.")
    ] = 10.0,
    check_interval: Annotated[
        float, typer.Option(min=0.05, max=60.0, help="Seconds between two looks at a replica's health.")
    ] = 1.0,
) -> None:
    """Route requests to replicas: those of a session (`X-Session-ID`, or `session_id` in the body) to the same one while it is
    up, others to the one with the fewest open requests. A replica that dies is left out until it is back.

    Replicas that share a --snapshot-dir go on with each other's sessions without computing them again.

    Examples:

        kvscope route --replica http://127.0.0.1:8001 --replica http://127.0.0.1:8002
    """
    if not insecure and not is_loopback(host):
        raise ConfigError(
            f"{host} can be reached from other machines, and the router asks for no token itself.",
            next_step="Listen on 127.0.0.1, or set KVSCOPE_TOKEN for each replica and give --insecure.",
        )
    tls = Tls.of(tls_cert, tls_key)
    import logging

    from observability.engine.http_server import HttpServer, listen
    from observability.engine.router import Router, RouterSettings, create_router_app

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    router = Router(replica, RouterSettings(check_seconds=check_interval))
    with listen(host, port) as listener, quiet_signals():
        address, number = listener.getsockname()[:2]
        base = f"{scheme(tls)}://[{address}]:{number}" if ":" in address else f"{scheme(tls)}://{address}:{number}"
        typer.echo(
            f"Routing to {len(router.replicas)} replicas\n"
            f"  API      {base}/v1\n  metrics  {base}/metrics\n  health   {base}/health\nCtrl-C stops it."
        )
        HttpServer(create_router_app(router, metrics_of(router)), router, grace_seconds=grace, tls=tls).run(
            sockets=[listener]
        )


def metrics_of(router: Router) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint that answers with the router's own counters."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
    from prometheus_client.registry import Collector
    from starlette.responses import Response

    class Counters(Collector):
        def collect(self) -> Iterable[Metric]:
            requests = CounterMetricFamily(
                "kvscope_router_requests",
                "Requests by replica and what became of them there.",
                labels=["replica", "outcome"],
            )
            for (url, outcome), count in sorted(router.counts.items()):
                requests.add_metric([url, outcome], count)
            up = GaugeMetricFamily("kvscope_router_replica_up", "1 while a replica gets requests.", labels=["replica"])
            for replica in router.replicas:
                up.add_metric([replica.url], replica.up)
            return [requests, up]

    registry = CollectorRegistry()
    registry.register(Counters())

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return metrics
