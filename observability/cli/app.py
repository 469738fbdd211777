"""`kvscope app`: the Streamlit pages over a recorded store or a Prometheus server."""

from __future__ import annotations

from typing import Annotated

import typer

from observability.cli._tls import TlsCert, TlsKey
from observability.tls import Tls


def register(app: typer.Typer) -> None:
    app.command("app")(serve_app)


def serve_app(
    source: Annotated[
        str | None,
        typer.Option(
            envvar="KVSCOPE_SOURCE",
            help="File of a recorder, or prometheus:URL. Default: the recorded history in the user's data folder.",
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the app.")] = 8501,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(
            envvar="KVSCOPE_ENDPOINTS",
            metavar="URL",
            help="An engine's metrics, for the page Engines to look at as `kvscope doctor` does; may be given more than once. "
            "A bearer token for them is read from KVSCOPE_ENDPOINT_TOKEN.",
            show_default=False,
        ),
    ] = None,
    trace_url: Annotated[
        str,
        typer.Option(
            envvar="KVSCOPE_TRACE_URL",
            metavar="URL",
            show_default=False,
            help="Where the trace of a slow request is shown, with {trace_id} in it, for links on the page P99.",
        ),
    ] = "",
    auth_header: Annotated[
        str,
        typer.Option(
            envvar="KVSCOPE_APP_AUTH_HEADER",
            metavar="NAME",
            show_default=False,
            help="Header in which a proxy names the user, such as X-Forwarded-User: who comes without it is refused. Only the proxy "
            "may reach the app, and it must replace that header. A token to be asked for instead is read from KVSCOPE_APP_TOKEN.",
        ),
    ] = "",
) -> None:
    """Show the pages in a browser, until Ctrl-C: is the service well, why is the P99 bad, what comes, what would change it.

    \b
    kvscope app                                  # the recorded history
    kvscope app --source ./kvscope.sqlite --port 8600
    kvscope app --source prometheus:http://127.0.0.1:9090 --endpoint http://127.0.0.1:8000/metrics
    """
    import os

    from platformdirs import user_data_path

    tls = Tls.of(tls_cert, tls_key)
    from observability.app.serve import Access, serve

    access = Access(os.environ.get("KVSCOPE_APP_TOKEN", ""), auth_header)
    serve(
        source or str(user_data_path("kvscope") / "kvscope.sqlite"),
        host,
        port,
        endpoints=endpoint or (),
        tls=tls,
        access=access,
        trace_url=trace_url,
    )
