"""The model that learns from all series together: from nothing after its time, and from a file that runs nothing."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from observability.errors import ConfigError
from observability.forecast import pooled as module
from observability.forecast.pooled import Network, PooledError, examples, load, path_beside, pooled, save, train
from observability.forecast.series import GridSeries, window
from observability.forecast.stack import stack
from observability.store.forecasts import HORIZON_STEPS, LEVELS
from tests.forecast.conftest import END, gridded
from tests.forecast.conftest import load as made_load

THEN = END - 86400.0


def fleet() -> list[GridSeries]:
    """Three series of eight days."""
    return [gridded(size * made_load(8, seed)) for seed, size in enumerate((1.0, 0.1, 30.0))]


@pytest.fixture(scope="module")
def network() -> Network:
    """Trained a day before END."""
    return train(fleet(), THEN)


def test_nothing_after_its_time_reaches_the_weights(network: Network) -> None:
    changed = fleet()
    for series in changed:
        series.values[series.ends > THEN] = 999.0
    again = train(changed, THEN)
    for each in fields(Network):
        assert np.array_equal(getattr(network, each.name), getattr(again, each.name)), each.name
    assert network.until == THEN
    assert network.series == 3


def test_it_says_nothing_of_hours_that_it_has_seen(network: Network) -> None:
    series = fleet()[0]
    with pytest.raises(PooledError, match="has learned from what came after"):
        pooled(network, window(series, THEN - 600))
    assert np.isfinite(pooled(network, window(series, THEN)).quantiles).all()
    with pytest.raises(PooledError, match="two days"):
        pooled(network, window(gridded(made_load(1)), END))


def test_the_forecast_is_half_the_stack_and_half_what_was_learned(network: Network) -> None:
    seen = window(fleet()[1], END)
    made, alone = pooled(network, seen), stack(seen)
    assert made.quantiles.shape == (HORIZON_STEPS, len(LEVELS))
    silent = replace(network, w3=0 * network.w3, b3=0 * network.b3)  # says that the stack errs by nothing
    middle = alone.quantiles[:, [LEVELS.index(0.5)]]
    nothing = pooled(silent, seen).quantiles
    spread = nothing - nothing[:, [LEVELS.index(0.5)]]
    np.testing.assert_allclose(spread, 0.5 * (alone.quantiles - middle))
    moved = made.quantiles[:, LEVELS.index(0.5)] - alone.quantiles[:, LEVELS.index(0.5)]
    np.testing.assert_allclose(made.paths - alone.paths, np.broadcast_to(moved, made.paths.shape))


def test_slopes_are_those_of_the_pinball_loss() -> None:
    rng = np.random.default_rng(4)
    outputs = HORIZON_STEPS * len(LEVELS)
    weights = [rng.normal(0, 0.5, shape) for shape in ((7, 5), (5,), (5, 6), (6,), (6, outputs), (outputs,))]
    x, target = rng.normal(size=(9, 7)), rng.normal(size=(9, outputs))
    levels = np.tile(LEVELS, HORIZON_STEPS)

    def loss() -> float:
        one = np.maximum(x @ weights[0] + weights[1], 0)
        said = np.maximum(one @ weights[2] + weights[3], 0) @ weights[4] + weights[5]
        off = target - said
        return float(np.maximum(levels * off, (levels - 1) * off).sum() / len(x))

    for weight, slope in zip(weights, module._slopes(weights, x, target, levels), strict=True):
        place = tuple(int(rng.integers(n)) for n in weight.shape)
        was = weight[place]
        weight[place] = was + 1e-6
        above = loss()
        weight[place] = was - 1e-6
        below = loss()
        weight[place] = was
        assert slope[place] == pytest.approx((above - below) / 2e-6, abs=1e-5)


def test_what_it_learned_holds_on_a_series_that_it_has_not_seen(network: Network) -> None:
    """Its quantiles are nearer to the stack's errors there than the plain quantiles of all that it learned from."""
    x, y = examples(window(gridded(made_load(7, seed=9)), END))
    learned = np.concatenate([examples(window(series, THEN))[1] for series in fleet()])
    plain = np.quantile(learned, LEVELS, axis=0).T[None]

    def off(said: np.ndarray) -> float:
        miss = y[:, :, None] - said
        return float(np.maximum(np.array(LEVELS) * miss, (np.array(LEVELS) - 1) * miss).mean())

    assert off(network(x)) < 1.02 * off(plain)
    assert (np.diff(network(x), axis=2) >= 0).all()


def test_a_file_gives_the_same_forecast_and_another_is_refused(network: Network, tmp_path: Path) -> None:
    path = path_beside(tmp_path / "kvscope.sqlite")
    save(network, path)
    seen = window(fleet()[2], END)
    assert np.array_equal(pooled(load(path), seen).quantiles, pooled(network, seen).quantiles)
    assert [each.name for each in tmp_path.iterdir()] == ["kvscope.sqlite.pooled.npz"]
    whole = path.read_bytes()
    pickled = tmp_path / "objects.npz"
    np.savez(pickled, kind=np.array(print, dtype=object))
    for content in (b"", whole[: len(whole) // 2], pickle.dumps(network), pickled.read_bytes()):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="is not a trained pooled model"):
            load(path)
    save(replace(network, w2=network.w2 * np.nan), path)
    with pytest.raises(ConfigError, match="not finite"):
        load(path)


def test_too_little_history_is_said() -> None:
    with pytest.raises(ConfigError, match="a pooled model needs 2000"):
        train([gridded(made_load(3))], END)
