"""What the page is looking at: one model, one time range, one time zone. Kept in the URL, shared by all pages."""

from __future__ import annotations

from dataclasses import dataclass
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd

#: Time ranges offered: name in the URL -> seconds.
RANGES = {"15m": 900, "1h": 3600, "6h": 6 * 3600, "24h": 86400, "3d": 3 * 86400, "7d": 7 * 86400}
DEFAULT_RANGE = "1h"
#: Steps between points; the smallest that keeps a chart at or under MAX_POINTS is taken.
STEPS = (15, 30, 60, 120, 300, 600, 900, 1800, 3600)
MAX_POINTS = 240


@dataclass(frozen=True, slots=True)
class View:
    """Points at `end`, `end` - `step`, ... not before `start` (Unix seconds), of `model`, shown in time zone `zone`."""

    model: str
    start: float
    end: float
    step: float
    zone: str = "UTC"

    @property
    def where(self) -> dict[str, str]:
        return {"model": self.model}

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def times(self) -> pd.DatetimeIndex:
        """The moments that a source is read at (UTC)."""
        count = round(self.seconds / self.step) + 1
        return pd.to_datetime(self.start + self.step * np.arange(count), unit="s", utc=True).as_unit("ns")


def make_view(model: str, seconds: float, now: float, zone: str = "UTC") -> View:
    """The last `seconds` before `now`, on a grid of whole steps, so that viewers of the same moment share cached reads."""
    step = next((s for s in STEPS if seconds / s <= MAX_POINTS), STEPS[-1])
    # The end is on a finer grid than the step: a 7-day chart must not end up to an hour ago.
    end = now // STEPS[0] * STEPS[0]
    return View(model, end - seconds, end, float(step), zone)


def shown(times: pd.DatetimeIndex, zone: str) -> pd.DatetimeIndex:
    """Times of `zone` without their zone, as charts show them."""
    return times.tz_convert(ZoneInfo(zone)).tz_localize(None)


def moment(unix: float, zone: str) -> pd.Timestamp:
    """One Unix time as `shown`."""
    return pd.Timestamp(unix, unit="s", tz="UTC").tz_convert(ZoneInfo(zone)).tz_localize(None)
