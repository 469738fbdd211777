"""What the vLLM plug-in can feed, signal by signal: worked out from what it says of its families (exporters/vllm/capabilities.py).

A signal with status no has no series at all from the plug-in, never a zero.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from exporters.adapters.capability import YES, Capability, no, partial
from exporters.vllm.capabilities import families
from observability import catalog
from observability.signals import SIGNALS, Signal

_PARTS = ("", "_total", "_bucket", "_sum", "_count", "_info")
_BY_SERIES = {family.name + part: family.name for family in catalog.FAMILIES for part in _PARTS}


def families_of(signal: Signal) -> list[str]:
    """Names of the families that `signal` is worked out from."""
    asked = re.findall(r"\bkvscope_\w+", signal.promql)
    return list(dict.fromkeys(_BY_SERIES[name] for name in asked if name in _BY_SERIES))


def from_families(signal: Signal, told: Mapping[str, tuple[str, str]]) -> Capability:
    """Of a signal from (status, reason) of its families: as good as the worst of them."""
    found = [told[name] for name in families_of(signal) if name in told]
    for status, make in (("no", no), ("partial", partial)):
        reasons = dict.fromkeys(part for has, reason in found if has == status for part in reason.split("; "))
        if reasons:
            return make("; ".join(reasons))
    return YES


#: As vLLM is started, and with every flag that makes it tell more.
_PLAIN = families(prefix_cache=True, frontend=True)
_FLAGS = families(prefix_cache=True, frontend=True, events=True, sampled=True)


def _capability(signal: Signal) -> Capability:
    plain = from_families(signal, _PLAIN)
    needs_a_flag = plain.status == "no" and from_families(signal, _FLAGS).status != "no"
    return partial(plain.reason) if needs_a_flag else plain


CAPABILITIES: Mapping[str, Capability] = {signal.name: _capability(signal) for signal in SIGNALS}
