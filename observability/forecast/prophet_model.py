"""Prophet, anchored: its trend and daily shape plus what is left of the newest residual (AR(1)).

Prophet alone ignores where the series is now and loses to repeating the last value by far; the anchor repairs most of it
without a refit. Prophet's maintainers agree that residual autocorrelation decays and is to be corrected outside.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import pandas as pd

from observability.errors import KvscopeError
from observability.forecast.draft import Draft, ahead, whole_rows
from observability.forecast.series import WANTED_SECONDS, Window
from observability.store.forecasts import HORIZON_STEPS, LEVELS, STEP_SECONDS

SEED = 20261
SAMPLES = 1000
#: Its solver's two lines a fit, its changepoint remarks and its complaint about an absent plotly.
_NOISY_LOGGERS = ("cmdstanpy", "prophet", "prophet.plot")


class FitError(KvscopeError):
    """Prophet's solver gave up on a series."""


@dataclass(frozen=True)
class ProphetFit:
    """`samples`: Prophet's predictive draws of the next steps [HORIZON_STEPS, SAMPLES]. `residuals`: observed minus fitted
    over the window [steps], NaN where not observed."""

    samples: np.ndarray
    residuals: np.ndarray

    @property
    def phi(self) -> float:
        """Share of a residual that is left one step later: lag-1 least squares over observed neighbours, in [0, 1]."""
        before, after = self.residuals[:-1], self.residuals[1:]
        both = np.isfinite(before) & np.isfinite(after)
        power = float(before[both] @ before[both])
        return min(1.0, max(0.0, float(before[both] @ after[both]) / power)) if power > 0 else 0.0

    @property
    def anchor(self) -> np.ndarray:
        """What the newest residual adds to each of the next steps [HORIZON_STEPS]: phi^h times it."""
        return self.residuals[-1] * self.phi ** np.arange(1, HORIZON_STEPS + 1)


def prophet_ar1(window: Window) -> Draft:
    """Quantiles of Prophet's predictive draws, shifted by the anchor; paths of how its residuals went on in the window (its
    draws know nothing of how one step follows another). Raises FitError."""
    fit = fit_prophet(window)
    quantiles = np.quantile(fit.samples + fit.anchor[:, None], LEVELS, axis=1).T
    decayed = fit.residuals[:, None] * fit.phi ** np.arange(1, HORIZON_STEPS + 1)
    median = quantiles[:, LEVELS.index(0.5)]
    return Draft(quantiles, median + whole_rows(ahead(fit.residuals) - decayed))


def fit_prophet(window: Window) -> ProphetFit:
    """Prophet on the window: daily shape from two days on, weekly off. The same window gives the same numbers; nothing is
    logged and no file is left. Raises FitError."""
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).disabled = True
    from prophet import Prophet

    model = Prophet(
        interval_width=0.95,
        daily_seasonality=len(window.values) * STEP_SECONDS >= WANTED_SECONDS,
        weekly_seasonality=False,
        yearly_seasonality=False,
        uncertainty_samples=SAMPLES,
    )
    history = pd.DataFrame({"ds": _naive_utc(window.ends), "y": window.values})
    ahead = window.origin + STEP_SECONDS * np.arange(1, HORIZON_STEPS + 1)
    # Prophet draws from numpy's global state: it is put back, so that nobody else's numbers depend on a forecast.
    state = np.random.get_state()
    try:
        np.random.seed(SEED)
        model.fit(history, seed=SEED)
        samples = model.predictive_samples(pd.DataFrame({"ds": _naive_utc(ahead)}))["yhat"]
    except (RuntimeError, ValueError) as error:
        raise FitError(f"Prophet could not fit the series: {error}") from error
    finally:
        np.random.set_state(state)
        if model.stan_backend is not None:
            model.stan_backend.cleanup()  # two files a fit would stay until the process ends
    model.uncertainty_samples = 0  # the fitted values alone: draws over the whole history cost more than the fit
    fitted = model.predict(history[["ds"]])["yhat"].to_numpy(dtype=np.float64)
    return ProphetFit(np.asarray(samples, dtype=np.float64), window.values - fitted)


def _naive_utc(times: np.ndarray) -> pd.DatetimeIndex:
    """Unix seconds as UTC without a time zone, which Prophet refuses."""
    return pd.to_datetime(times.astype(np.int64), unit="s")
