"""How Streamlit is run: local, quiet, in one theme with a light and a dark side. As options of `streamlit run`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from observability.tls import Tls

#: Environment variable that names the source for the app's process; `kvscope app --source` sets it.
SOURCE_VARIABLE = "KVSCOPE_SOURCE"
#: ... the addresses, with spaces between, that the page Engines looks at, and the bearer token for them.
ENDPOINTS_VARIABLE, ENDPOINT_TOKEN_VARIABLE = "KVSCOPE_ENDPOINTS", "KVSCOPE_ENDPOINT_TOKEN"
#: Address of a trace with {trace_id} in it, for links from slow requests.
TRACE_URL_VARIABLE = "KVSCOPE_TRACE_URL"
#: plotly.js with the charts that have axes (npm: plotly.js-cartesian-dist-min, of the version that Plotly for Python comes with): a third of
#: the whole, which a browser would take half a second to read.
PLOTLY = Path(__file__).with_name("plotly-cartesian-4.1.1.min.js")
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'Liberation Sans', sans-serif"
_MONO = "ui-monospace, 'SF Mono', 'Cascadia Code', 'Noto Sans Mono', 'Liberation Mono', monospace"
LIGHT_BACKGROUND, DARK_BACKGROUND = "#ffffff", "#12161c"

_LIGHT = {
    "primaryColor": "#2467a6", "backgroundColor": LIGHT_BACKGROUND, "secondaryBackgroundColor": "#f4f6f8",
    "textColor": "#1c2733", "borderColor": "#dfe4ea",
}  # fmt: skip
_DARK = {
    "primaryColor": "#5aa2e0", "backgroundColor": DARK_BACKGROUND, "secondaryBackgroundColor": "#1b222b",
    "textColor": "#dde4ec", "borderColor": "#2b3440",
}  # fmt: skip


def options(host: str, port: int, tls: Tls | None = None) -> dict[str, Any]:
    """Options by the name that streamlit.web.bootstrap takes: section and option joined by an underscore."""
    return {
        "server_address": host,
        "server_port": port,
        "server_headless": True,
        "server_fileWatcherType": "none",
        "server_runOnSave": False,
        "browser_gatherUsageStats": False,
        "client_toolbarMode": "minimal",
        "client_showErrorDetails": "none",
        **({} if tls is None else {"server_sslCertFile": str(tls.cert), "server_sslKeyFile": str(tls.key)}),
        "theme_font": _FONT,
        "theme_codeFont": _MONO,
        "theme_baseFontSize": 14,
        "theme_baseRadius": "8px",
        "theme_showWidgetBorder": True,
        **{f"theme_light_{name}": value for name, value in _LIGHT.items()},
        **{f"theme_dark_{name}": value for name, value in _DARK.items()},
    }
