"""Links to traces: only a configured address with a trace's id in its path, whatever the id claims to be."""

from __future__ import annotations

import pytest

from observability.app import traces
from observability.errors import ConfigError

TEMPLATE = "https://tempo.example/trace/{trace_id}?org=1&x=2"
ID = "4bf92f3577b34da6a3ce929d0e0e4736"


def test_a_trace_id_is_put_into_the_configured_address() -> None:
    traces.check(TEMPLATE)
    link = traces.link(TEMPLATE, {"trace_id": ID})
    assert f'href="https://tempo.example/trace/{ID}?org=1&amp;x=2"' in link
    assert 'rel="noopener noreferrer"' in link


@pytest.mark.parametrize(
    "claimed", ['"><script>alert(1)</script>', "../../admin", "javascript:alert(1)", "4bf9@evil.example", ""]
)
def test_what_is_no_trace_id_never_becomes_an_address(claimed: str) -> None:
    link = traces.link(TEMPLATE, {"trace_id": claimed, "request_id": "<b>r1"})
    assert "href" not in link
    assert "<script" not in link
    assert "<b>" not in link


@pytest.mark.parametrize(
    "template",
    [
        "javascript:alert('{trace_id}')",
        "https://{trace_id}.example/",
        "https://tempo.example/trace/",
        "/trace/{trace_id}",
        "http:///{trace_id}",
    ],
)
def test_a_template_that_is_no_address_is_refused(template: str) -> None:
    with pytest.raises(ConfigError, match="not the address of a trace"):
        traces.check(template)
