"""Links from a slow request to its trace: a configured address with {trace_id} in it, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape
from urllib.parse import urlsplit

from observability.errors import ConfigError

PLACE = "{trace_id}"
_TRACE_ID = re.compile(r"[0-9a-fA-F]{16,32}")


def check(template: str) -> None:
    """Raises ConfigError for a template that is no http address with one {trace_id} behind its host."""
    parts = urlsplit(template)
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or template.count(PLACE) != 1
        or PLACE in parts.netloc
    ):
        raise ConfigError(
            f"{template!r} is not the address of a trace.",
            next_step=f"Give one such as http://tempo.example/trace/{PLACE}.",
        )


def link(template: str, ids: Mapping[str, str]) -> str:
    """HTML: the trace's id as a link, or the request's id as text. Ids come from clients: one that is no trace id is never in an address."""
    trace = ids.get("trace_id", "")
    if not _TRACE_ID.fullmatch(trace):
        return escape(trace or ids.get("request_id", ""))
    if not template:
        return escape(trace)
    return f'<a href="{escape(template.replace(PLACE, trace))}" target="_blank" rel="noopener noreferrer">{trace[:12]}…</a>'
