"""The running vector of seconds by step component, from which each request's latency is split into phases.

The engine's thread calls `lap` whenever it ends doing something; the time since the previous lap goes to that component,
so the vector always sums to `last - start`. A request keeps the vector's value at each state change and adds the
difference to the row of the state it leaves: its state x component matrix sums to its latency by construction, at a cost
per state change and not per step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf

from observability.catalog import ANOMALIES, COMPONENTS, PREEMPTION_REASONS, STATES

SCHEDULE = COMPONENTS.index("schedule")
EMIT = COMPONENTS.index("emit")
IDLE = COMPONENTS.index("idle")
QUEUED, PREFILL, PREEMPTED = STATES.index("queued"), STATES.index("prefill"), STATES.index("preempted")
SWAPPED = STATES.index("swapped")
KV_SWAP = PREEMPTION_REASONS.index("kv_swap")
NEGATIVE_INTERVAL = ANOMALIES.index("negative_interval")
NEGATIVE_INCREMENT = ANOMALIES.index("negative_increment")
MISSING_MILESTONE = ANOMALIES.index("missing_milestone")
MILESTONE_ORDER = ANOMALIES.index("milestone_order")
CLOCK_STEP = ANOMALIES.index("clock_step")
DUPLICATE_FINISH = ANOMALIES.index("duplicate_finish")
NON_FINITE = ANOMALIES.index("non_finite")
RECORD_ERROR = ANOMALIES.index("record_error")
UNREADABLE_FIELD = ANOMALIES.index("unreadable_field")

#: Steps whose start is remembered, for requests that arrived before the step in which they are picked up.
_MARKS = 8


class StepClock:
    """Attributes the step loop's time to components. Written by the engine's thread only.

    `seconds[i]` belongs to COMPONENTS[i]; `sum(seconds) == last - start` up to float rounding. If the clock steps
    back, `start` moves with it, so that the sum still holds, and the step is counted as an anomaly.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.start = self.last = clock()
        self.seconds = [0.0] * len(COMPONENTS)
        self._marks: deque[tuple[float, list[float]]] = deque(maxlen=_MARKS)
        self._anomalies = [0.0] * len(ANOMALIES)

    def lap(self, component: int) -> float:
        """Gives the time since the previous lap to `component`; returns the clock's value."""
        now = self._clock()
        elapsed = now - self.last
        if 0.0 <= elapsed < inf:  # as lap_to, without a second call on the hot path
            self.seconds[component] += elapsed
            self.last = now
        else:
            self.lap_to(component, now)
        return now

    def lap_to(self, component: int, now: float) -> None:
        """`lap` with a clock value that is already known: virtual time splits one step in parts with it."""
        elapsed = now - self.last
        if 0.0 <= elapsed < inf:
            self.seconds[component] += elapsed
            self.last = now
        elif -inf < elapsed < 0.0:
            self._anomalies[CLOCK_STEP] += 1
            self._marks.clear()
            self.start += elapsed
            self.last = now
        else:
            self._anomalies[NON_FINITE] += 1

    def begin_step(self) -> None:
        """Remembers (time, vector) at the start of a step, so that a later arrival inside it can be attributed."""
        self._marks.append((self.last, self.seconds.copy()))

    def vector_at(self, when: float) -> list[float]:
        """The vector as it stood at `when`; its sum is `when - start` for any `when` up to the last lap.

        Exact at the last lap. Earlier it is linear between the starts of the last steps: of a step [s, p] the part
        [when, p] counts (vector(p) - vector(s)) * (p - when) / (p - s). Before `start` everything is idle time.
        """
        if when >= self.last:
            return self.seconds.copy()
        if when < self.start:
            vector = [0.0] * len(self.seconds)
            vector[IDLE] = when - self.start
            return vector
        after, later = self.last, self.seconds
        before, earlier = self.start, [0.0] * len(self.seconds)
        for time, vector in reversed(self._marks):
            if time <= when:
                before, earlier = time, vector
                break
            after, later = time, vector
        share = (when - before) / (after - before)
        # min: rounding must not put a part past the end of its step, or a difference to it would be negative.
        return [min(a + (b - a) * share, b) for a, b in zip(earlier, later, strict=True)]
