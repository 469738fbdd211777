"""What the engine's optional mechanisms did: moves of KV blocks, prefetch, batching, the load controller. Same rules as recorder.py.

Series of a mechanism exist once it is switched on (`expect`), with 0, so that a rate sees the first increment.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from math import nan

from observability import catalog as c
from observability.telemetry.snapshot import Block, Histograms, counters

COMPACTION, COMPRESS, OFFLOAD, LOAD, SWAP_OUT, SWAP_IN = range(len(c.MOVES))
ISSUED, USEFUL, LATE, WASTED = range(len(c.PREFETCH_OUTCOMES))
_RULES, _ACTIONS = len(c.CONTROLLER_RULES), len(c.CONTROLLER_ACTIONS)


class Mechanisms:
    """Counters of one engine, written by the engine's thread only, but for those of sessions, whose writer takes turns by itself.
    Times are given by the caller, in seconds."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._expected: set[str] = set()
        self._moved = [0.0] * len(c.MOVES)
        self._move_seconds = [0.0] * len(c.MOVES)
        self._move_used = [False] * len(c.MOVES)
        self._copy_seconds = [0.0] * len(c.COPY_OVERLAPS)
        self._recovered = [0.0]
        self._prefetched = [0.0] * len(c.PREFETCH_OUTCOMES)
        self._layout_changes = [0.0] * len(c.LAYOUTS)
        self._splits = [0.0]
        self._promotions = [0.0] * len(c.CLASSES)
        self._limits = [nan, nan]  # batched tokens, prefills
        self._changes = [0.0] * (_RULES * _ACTIONS)
        self._degraded = [0.0] * _RULES
        self._saves = [0.0] * len(c.SESSION_SAVES)
        self._resumes = [0.0] * len(c.SESSION_RESUMES)
        self._imported = [0.0]
        by_model = [(model,)]
        self._switch_loss = Histograms(c.KV_SWITCH_LOSS, by_model)
        self._spread = Histograms(c.PREFILL_SPREAD, by_model)

    def expect(
        self,
        *,
        moves: Iterable[int] = (),
        prefetch: bool = False,
        controller: bool = False,
        sessions: bool = False,
        copies: bool = False,
    ) -> None:
        """These can happen from now on: their series exist."""
        for move in moves:
            self._move_used[move] = True
        flags = {"prefetch": prefetch, "controller": controller, "sessions": sessions, "copies": copies}
        for name, on in flags.items():
            if on:
                self._expected.add(name)

    def expects_move(self, *moves: int) -> bool:
        """Whether one of `moves` (indices in MOVES) can happen or has happened."""
        return any(self._move_used[move] for move in moves)

    def moved(self, reason: int, blocks: int, seconds: float = 0.0) -> None:
        """`blocks` were moved (index in MOVES), for which the engine did nothing else for `seconds`."""
        self._move_used[reason] = True
        self._moved[reason] += blocks
        self._move_seconds[reason] += max(seconds, 0.0)

    def copied(self, hidden: float, exposed: float) -> None:
        """Copies between device and host took so many seconds beside steps, and so many without one."""
        self._copy_seconds[0] += hidden
        self._copy_seconds[1] += exposed

    def recovered(self, blocks: int) -> None:
        """A slice of compaction made the longest allocatable run longer by `blocks`; less than 0 counts as 0."""
        self._recovered[0] += max(blocks, 0)

    def prefetch(self, outcome: int, blocks: int) -> None:
        """What became of prefetched blocks (index in PREFETCH_OUTCOMES)."""
        self._expected.add("prefetch")
        self._prefetched[outcome] += blocks

    def layout_changed(self, layout: int) -> None:
        """A running sequence took on `layout` (index in LAYOUTS)."""
        self._layout_changes[layout] += 1

    def context_switch(self, loss: float) -> None:
        """Hit ratio lost at a change of class or tenant; less than 0 counts as 0."""
        _observe(self._switch_loss, max(loss, 0.0))

    def batch_spread(self, ratio: float) -> None:
        """q75/q25 of the lengths in prefill at a step."""
        _observe(self._spread, ratio)

    def batch_split(self) -> None:
        """A step left prefills out for the spread of their lengths."""
        self._splits[0] += 1

    def promoted(self, class_index: int) -> None:
        """A waiting request became overdue and goes to the front."""
        self._promotions[class_index] += 1

    def limits(self, batched_tokens: int, prefills: int) -> None:
        """The limits that the controller has set."""
        self._expected.add("controller")
        self._limits = [float(batched_tokens), float(prefills)]

    def controller_changed(self, rule: int, action: int) -> None:
        """The controller changed limits (indices in CONTROLLER_RULES and CONTROLLER_ACTIONS)."""
        self._changes[rule * _ACTIONS + action] += 1

    def degraded(self, rule: int) -> None:
        """One more request is degraded by a rule (index in CONTROLLER_RULES)."""
        self._degraded[rule] += 1

    def session_saved(self, outcome: str) -> None:
        """What became of a session's snapshot (of SESSION_SAVES)."""
        self._saves[c.SESSION_SAVES.index(outcome)] += 1

    def session_resumed(self, outcome: str) -> None:
        """How a turn of a session began (of SESSION_RESUMES)."""
        self._resumes[c.SESSION_RESUMES.index(outcome)] += 1

    def session_imported(self, tokens: int) -> None:
        """The KV of `tokens` came from a snapshot."""
        self._imported[0] += tokens

    def kv_blocks(self) -> Iterator[Block]:
        """Families of the KV part, in catalogue order."""
        m = self._model
        yield counters(c.KV_LAYOUT_CHANGES, [(m, layout) for layout in c.LAYOUTS], self._layout_changes)

    def move_blocks(self) -> Iterator[Block]:
        """Families of moves and prefetch, in catalogue order."""
        m = self._model
        reasons = tuple(("_total", (m, reason)) for reason in c.MOVES)
        yield Block(c.KV_MOVED_BLOCKS, reasons, lambda _: self._where_used(self._moved))
        yield Block(c.KV_MOVE_SECONDS, reasons, lambda _: self._where_used(self._move_seconds))
        yield Block(
            c.KV_COMPACTION_RECOVERED, (("_total", (m,)),),
            lambda _: self._recovered if self._move_used[COMPACTION] else (nan,),
        )  # fmt: skip
        outcomes = tuple(("_total", (m, outcome)) for outcome in c.PREFETCH_OUTCOMES)
        yield Block(c.KV_PREFETCH_BLOCKS, outcomes, lambda _: self._if_expected("prefetch", self._prefetched))
        yield self._switch_loss.block()

    def batching_blocks(self) -> Iterator[Block]:
        """Families of batching and controller, in catalogue order."""
        m = self._model
        yield self._spread.block()
        yield counters(c.BATCH_SPLITS, [(m,)], self._splits)
        yield counters(c.QUEUE_PROMOTIONS, [(m, name) for name in c.CLASSES], self._promotions)
        yield Block(c.LIMIT_BATCHED_TOKENS, (("", (m,)),), lambda _: self._limits[:1])
        yield Block(c.LIMIT_PREFILLS, (("", (m,)),), lambda _: self._limits[1:])
        changes = tuple(("_total", (m, rule, action)) for rule in c.CONTROLLER_RULES for action in c.CONTROLLER_ACTIONS)
        yield Block(c.CONTROLLER_CHANGES, changes, lambda _: self._if_expected("controller", self._changes))
        rules = tuple(("_total", (m, rule)) for rule in c.CONTROLLER_RULES)
        yield Block(c.REQUESTS_DEGRADED, rules, lambda _: self._if_expected("controller", self._degraded))

    def session_blocks(self) -> Iterator[Block]:
        """Families of sessions, in catalogue order."""
        m = self._model
        saves = tuple(("_total", (m, outcome)) for outcome in c.SESSION_SAVES)
        yield Block(c.SESSION_SNAPSHOTS, saves, lambda _: self._if_expected("sessions", self._saves))
        resumes = tuple(("_total", (m, outcome)) for outcome in c.SESSION_RESUMES)
        yield Block(c.SESSION_STARTS, resumes, lambda _: self._if_expected("sessions", self._resumes))
        yield Block(c.SESSION_TOKENS, (("_total", (m,)),), lambda _: self._if_expected("sessions", self._imported))

    def copy_blocks(self, device: str, virtual: bool) -> Iterator[Block]:
        """Copies beside steps, and whether they are measured: on a GPU with a host tier, from the first copy on."""
        overlaps = tuple(("_total", (self._model, overlap)) for overlap in c.COPY_OVERLAPS)
        yield Block(c.KV_COPY_SECONDS, overlaps, lambda _: self._if_expected("copies", self._copy_seconds))
        never = "virtual_time" if virtual else "" if device.startswith("cuda") else "no_gpu"
        reasons = (never,) if never else ("none", "no_host_tier", "no_copies")
        rows = tuple(
            ("_info", ("copy_compute_overlap", "measured" if reason == "none" else "unavailable", reason))
            for reason in reasons
        )

        def read(_: object) -> list[float]:
            now = never or (
                "no_host_tier" if "copies" not in self._expected else "none" if any(self._copy_seconds) else "no_copies"
            )
            return [1.0 if reason == now else nan for reason in reasons]

        yield Block(c.HARDWARE_STATUS, rows, read)

    def _where_used(self, values: list[float]) -> list[float]:
        return [value if used else nan for value, used in zip(values, self._move_used, strict=True)]

    def _if_expected(self, name: str, values: list[float]) -> list[float]:
        return values if name in self._expected else [nan] * len(values)


def _observe(histograms: Histograms, value: float) -> None:
    """Into the one label set of `histograms`."""
    histograms.cells[bisect_left(histograms.bounds, value)] += 1
    histograms.cells[-1] += value
