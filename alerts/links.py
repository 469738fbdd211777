"""Addresses of boards and runbooks inside a Grafana, and the scrape job that ours are."""

from __future__ import annotations

#: Where Grafana is reached from a browser; the compose file publishes it here. `kvscope rules write --grafana-url` changes it.
GRAFANA_URL = "http://127.0.0.1:3000"
#: The scrape job of deploy/prometheus.yml; KvscopeSourceStale tells by it which targets are ours. Jobs of other engines add a dash and
#: the engine's name (`kvscope scrape-config`).
JOB = "kvscope"


def board_uid(board: str) -> str:
    """Uid of the board called `board`, such as "kv-cache"."""
    return f"kvscope-{board}"


def board_url(board: str, base: str = "") -> str:
    """Link to a board; without `base` it is relative to the Grafana that shows it."""
    return f"{base}/d/{board_uid(board)}"


def runbook_uid(alert: str) -> str:
    """Uid of the Grafana page that shows the runbook of `alert`."""
    return f"kvscope-runbook-{alert.removeprefix('Kvscope').lower()}"


def runbook_url(alert: str, base: str = "") -> str:
    """Link to the runbook of `alert`; without `base` it is relative to the Grafana that shows it."""
    return f"{base}/d/{runbook_uid(alert)}"
