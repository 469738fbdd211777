"""Who asked: a small set of series for each tenant, of which there are only so many. The first to come get their own, all others share `other`.

Tenant ids come from clients, so they are unbounded, long and hostile; nothing here grows with their number.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from hashlib import blake2s
from math import nan

from observability import catalog as c
from observability.buckets import TENANT_TTFT
from observability.telemetry.snapshot import Block, Histograms, counters

OTHER = "other"
DEFAULT_MAX_TENANTS = 20
MAX_TENANT_LABEL = 64


def tenant_label(name: str) -> str:
    """`name` as a label value: valid Unicode of at most 64 characters. What is longer keeps its first 55 and a hash of the whole."""
    text = name.strip().encode("utf-8", "replace").decode()
    if len(text) <= MAX_TENANT_LABEL:
        return text
    return f"{text[:55]}~{blake2s(text.encode(), digest_size=4).hexdigest()}"


class Tenant:
    """Numbers of one tenant, or of all that share `other`. `refused` is written by threads that submit, the rest by the engine's."""

    __slots__ = ("_outcomes", "ended", "name", "refused", "tokens", "ttft")

    def __init__(self, model: str, name: str, outcomes: list[bool]) -> None:
        self._outcomes = outcomes
        self.name = name
        self.ended = [0.0] * len(c.OUTCOMES)
        self.refused = [0.0] * len(c.OUTCOMES)
        self.tokens = [0.0, 0.0]  # by TENANT_TOKEN_KINDS
        self.ttft = Histograms(c.TENANT_TTFT, [(model, name)], bounds=TENANT_TTFT)

    def first_token(self, seconds: float) -> None:
        cells = self.ttft.cells
        cells[bisect_left(self.ttft.bounds, seconds)] += 1
        cells[-1] += seconds

    def blocks(self, model: str) -> Iterator[Block]:
        outcomes = tuple(("_total", (model, self.name, outcome)) for outcome in c.OUTCOMES)
        yield Block(c.TENANT_REQUESTS, outcomes, lambda _: self._read_ended())
        yield self.ttft.block()
        kinds = [(model, self.name, kind) for kind in c.TENANT_TOKEN_KINDS]
        yield counters(c.TENANT_TOKENS, kinds, self.tokens)

    def has_ended(self, outcome: int) -> None:
        """A request ended (index in OUTCOMES)."""
        self._outcomes[outcome] = True
        self.ended[outcome] += 1

    def has_been_refused(self, outcome: int) -> None:
        """A request was refused before it was queued (index in OUTCOMES)."""
        self._outcomes[outcome] = True
        self.refused[outcome] += 1

    def _read_ended(self) -> list[float]:
        counts = zip(self.ended, self.refused, self._outcomes, strict=True)
        return [ended + refused if used else nan for ended, refused, used in counts]


class Tenants:
    """The tenants of one engine. `admit` is called by threads that submit, under a lock of theirs; the rest by the engine's thread."""

    def __init__(self, model: str, most: int) -> None:
        self._model = model
        self._most = most
        self._known: dict[str, Tenant] = {}
        # By OUTCOMES, of all tenants: an outcome has series once any tenant had it. Flags only ever become True.
        self._outcomes = [name in ("stop", "length", "abort") for name in c.OUTCOMES]
        self.seen: list[Tenant] = []  # in the order in which they came; only ever grows, up to `most` and `other`

    def admit(self, name: str) -> tuple[Tenant | None, bool]:
        """The tenant called `name` (None for no name, or when tenants are switched off), and whether it was folded into `other`."""
        if not name or not self._most:
            return None, False
        label = name if name in self._known else tenant_label(name)
        if not label:
            return None, False
        if (tenant := self._known.get(label)) is not None:
            return tenant, tenant.name == OTHER
        folded = label == OTHER or len(self.seen) - (OTHER in self._known) >= self._most
        label = OTHER if folded else label
        if (tenant := self._known.get(label)) is None:
            tenant = self._known[label] = Tenant(self._model, label, self._outcomes)
            self.seen.append(tenant)
        return tenant, folded

    def find(self, name: str) -> Tenant | None:
        """What `admit` gave for `name`. Takes no lock."""
        if not name or not self._known:
            return None
        if (tenant := self._known.get(name)) is not None:
            return tenant
        label = tenant_label(name)
        return (self._known.get(label) or self._known.get(OTHER)) if label else None
