"""Alerts on forecasts (exporters/forecast.py), and the series that they and the board Forecast read.

Without the instance of the exporter: what it tells is about the served model, whoever forecasts it.
"""

from __future__ import annotations

from alerts import symptoms
from alerts.links import JOB
from alerts.types import Alert, Recording
from observability import catalog as c
from observability import objectives as o

FORECAST_JOB = f"{JOB}-forecast"

VALUE = "model_signal_horizon_quantile:kvscope_forecast_value:max"
BREACH = "model_signal_limit_horizon:kvscope_forecast_breach_probability:max"
TIME_LEFT = "model_signal_limit_quantile:kvscope_forecast_time_left:seconds"
SKILL = "model_signal_forecaster:kvscope_forecast_skill:max"
COVERAGE = "model_signal_forecaster_band:kvscope_forecast_coverage:max"
TARGETS = "model_signal_forecaster:kvscope_forecast_scored_targets:max"
IN_USE = "model_signal_forecaster_status_history:kvscope_forecast:max"
AGE = "model_signal:kvscope_forecast_age:seconds"
RUN_AGE = "instance:kvscope_forecast_run_age:seconds"
FAILURES = "signal_reason:kvscope_forecast_failures:increase1h"

#: Chance within the hour at which exhaustion counts as predicted: half of these alerts are then true, as far as chances are.
LIKELY = 0.5
#: Two refreshes and the time that one takes.
STALE_AFTER_SECONDS = 1800
#: A day's share inside the 95 % band, below which the band is too narrow whatever the day was like.
COVERAGE_LOW = 0.85
#: Hourly forecasts of most of a day, six targets each.
MIN_TARGETS = 96


def _by(op: str, family: c.Family, *labels: str) -> str:
    return f"{op} by ({', '.join(labels)}) ({family.series})"


RECORDINGS: tuple[Recording, ...] = (
    Recording(VALUE, _by("max", c.FORECAST_VALUE, "model", "signal", "horizon", "quantile")),
    Recording(BREACH, _by("max", c.FORECAST_BREACH, "model", "signal", "limit", "horizon")),
    Recording(
        TIME_LEFT,
        # from now on, where the exporter tells it from what each forecast has seen
        f"min by (model, signal, limit, quantile) (\n  clamp_min(\n    {c.FORECAST_BREACH_TIME.series}\n"
        f"    + on (job, instance, model, signal) group_left () ({c.FORECAST_ORIGIN.series} - time()),\n    0\n  )\n)",
    ),
    Recording(SKILL, _by("max", c.FORECAST_SKILL, "model", "signal", "forecaster")),
    Recording(COVERAGE, _by("max", c.FORECAST_COVERAGE, "model", "signal", "forecaster", "band")),
    Recording(TARGETS, _by("max", c.FORECAST_TARGETS, "model", "signal", "forecaster")),
    Recording(IN_USE, _by("max", c.FORECAST, "model", "signal", "forecaster", "status", "history")),
    Recording(AGE, f"time() - {_by('max', c.FORECAST_ORIGIN, 'model', 'signal')}"),
    Recording(RUN_AGE, f"time() - {_by('max', c.FORECAST_LAST_RUN, 'instance')}"),
    Recording(FAILURES, f"sum by (signal, reason) (increase({c.FORECAST_FAILURES.series}[1h]))"),
)

ALERTS: tuple[Alert, ...] = (
    Alert(
        name="KvscopeKVExhaustionPredicted",
        severity="warning",
        # once it is full and requests wait, KvscopeKVCacheExhausted speaks
        expr=(
            f'{BREACH}{{limit="kv_exhaustion",horizon="60m"}} >= {LIKELY:g}\n'
            f'and on (model) {AGE}{{signal="kv_usage"}} < {STALE_AFTER_SECONDS}\n'
            f"unless on (model) (model:kvscope_kv_usage:ratio > {o.KV_USAGE_CRITICAL:g} and on (model) ({symptoms.EXHAUSTED}))"
        ),
        hold="11m",  # longer than the ten minutes between refreshes: two of them say so, unless the later one failed
        keep_firing="10m",
        summary="The KV pool is likely to run full within the hour.",
        description=(
            f"The newest forecast gives {{{{ $value | humanizePercentage }}}} for more than {o.KV_USAGE_CRITICAL * 100:g} % of the KV "
            "blocks of {{ $labels.model }} being held at some time of the hour from the end of its data (up to 30 minutes ago); for 11 minutes "
            f"forecasts have given at least {LIKELY * 100:g} %."
        ),
        labels_kept=("model", "signal", "limit", "horizon"),
        area="forecasts",
        board="forecast",
    ),
    Alert(
        name="KvscopeKVRoomPredictedGone",
        severity="warning",
        # where the pool as a whole runs full, KvscopeKVExhaustionPredicted says it; once requests wait for room, KvscopeKVCacheExhausted
        expr=(
            f'{BREACH}{{limit="kv_room",horizon="60m"}} >= {LIKELY:g}\n'
            f'and on (model) {AGE}{{signal="kv_free_requests"}} < {STALE_AFTER_SECONDS}\n'
            f"unless on (model) (model:kvscope_kv_free_requests:mean_length < {o.KV_ROOM_REQUESTS:g} and on (model) ({symptoms.EXHAUSTED}))\n"
            f'unless on (model) {BREACH}{{limit="kv_exhaustion",horizon="60m"}} >= {LIKELY:g}'
        ),
        hold="11m",
        keep_firing="10m",
        summary="Within the hour the free KV is likely to be too small for one more request.",
        description=(
            "The newest forecast gives {{ $value | humanizePercentage }} for the free KV of {{ $labels.model }} being too small for another "
            "request of the present mean length at some time of the hour from the end of its data (up to 30 minutes ago); for 11 minutes "
            f"forecasts have given at least {LIKELY * 100:g} %."
        ),
        labels_kept=("model", "signal", "limit", "horizon"),
        area="forecasts",
        board="forecast",
    ),
    Alert(
        name="KvscopeForecastStale",
        severity="warning",
        expr=f'{RUN_AGE} > {STALE_AFTER_SECONDS}\nor up{{job="{FORECAST_JOB}"}} == 0',
        hold="5m",
        keep_firing="5m",
        summary="Forecasts are no longer made.",
        description=(
            "{{ $labels.instance }} made its newest forecasts too long ago, or does not answer (seconds since then, or 0 for no answer: "
            "{{ $value }}): what the board Forecast shows is of the past, and alerts on forecasts are blind."
        ),
        labels_kept=("instance", "job"),
        area="forecasts",
        board="forecast",
    ),
    Alert(
        name="KvscopeForecastCoverageOff",
        severity="warning",
        expr=(
            f'{COVERAGE}{{band="95"}} < {COVERAGE_LOW:g}\n'
            f"and on (model, signal, forecaster) {TARGETS} >= {MIN_TARGETS}\n"
            f"and on (model, signal, forecaster) {IN_USE}"
        ),
        hold="30m",
        keep_firing="30m",
        summary="Forecasts are surer of themselves than they may be.",
        description=(
            "Of the last 24 hours of {{ $labels.signal }} of {{ $labels.model }}, {{ $value | humanizePercentage }} lay inside the 95 % band "
            f"of {{{{ $labels.forecaster }}}} (alert below {COVERAGE_LOW * 100:g} %)."
        ),
        labels_kept=("model", "signal", "forecaster", "band"),
        area="forecasts",
        board="forecast",
    ),
)
