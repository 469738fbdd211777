"""What the page is looking at: one model, one time range, one time zone, what to compare with. Kept in the URL, shared by all pages."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd

#: Time ranges offered: name in the URL -> seconds.
RANGES = {"15m": 900, "1h": 3600, "6h": 6 * 3600, "24h": 86400, "3d": 3 * 86400, "7d": 7 * 86400}
DEFAULT_RANGE = "1h"
#: What the shown time can be compared with: name in the URL -> days before, by the clocks of the view.
VERSUS = {"yesterday": 1, "last week": 7}
#: Seconds between points, by range: up to 3 days no event falls between the 5-minute windows of two points.
STEPS = {900: 15, 3600: 15, 6 * 3600: 30, 86400: 120, 3 * 86400: 300, 7 * 86400: 600}
#: Seconds between two refreshes: each step, at least and at most these.
FASTEST_REFRESH, SLOWEST_REFRESH = 15, 60


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

    def earlier(self, seconds: float) -> View:
        """The same span and grid, so many seconds before."""
        return replace(self, start=self.start - seconds, end=self.end - seconds)

    def days_before(self, days: int) -> View:
        """The same span and grid with its end at the same time of day so many days before, by the clocks of `zone`."""
        end = datetime.fromtimestamp(self.end, ZoneInfo(self.zone))
        return self.earlier(self.end - (end - timedelta(days=days)).timestamp())

    @property
    def clock(self) -> tzinfo:
        """How far the clocks of `zone` are from UTC at the end: the time axis of charts, on which no hour may come twice or be missing where
        clocks change inside of the view."""
        return timezone(datetime.fromtimestamp(self.end, ZoneInfo(self.zone)).utcoffset() or timedelta())

    @property
    def times(self) -> pd.DatetimeIndex:
        """The moments that a source is read at (UTC)."""
        return _grid(self.start, self.end, self.step)


@functools.lru_cache(64)
def _grid(start: float, end: float, step: float) -> pd.DatetimeIndex:
    count = round((end - start) / step) + 1
    return pd.to_datetime(start + step * np.arange(count), unit="s", utc=True).as_unit("ns")


def make_view(model: str, seconds: int, now: float, zone: str = "UTC") -> View:
    """The last `seconds` (one of RANGES) before `now`, so that viewers of the same moment share cached reads."""
    every = refresh_seconds(seconds)
    # The end is on the grid of the refresh, not of the step: a 7-day chart must not end minutes ago.
    end = now // every * every
    return View(model, end - seconds, end, float(STEPS[seconds]), zone)


def refresh_seconds(seconds: int) -> int:
    """Seconds between two refreshes of a page that shows the last `seconds`."""
    return min(max(STEPS[seconds], FASTEST_REFRESH), SLOWEST_REFRESH)


def shown(times: pd.DatetimeIndex, zone: str | tzinfo) -> pd.DatetimeIndex:
    """Times of `zone` without their zone, as charts show them."""
    return times.tz_convert(_zone(zone)).tz_localize(None)


def moment(unix: float, zone: str | tzinfo) -> pd.Timestamp:
    """One Unix time as `shown`."""
    return pd.Timestamp(unix, unit="s", tz="UTC").tz_convert(_zone(zone)).tz_localize(None)


def _zone(zone: str | tzinfo) -> tzinfo:
    return ZoneInfo(zone) if isinstance(zone, str) else zone


def unix_seconds(times: pd.Series | pd.Index) -> np.ndarray:
    """Unix seconds of UTC times, float64; read one by one as objects they would take a hundred times as long."""
    return pd.DatetimeIndex(times).as_unit("ns").asi8 / 1e9
