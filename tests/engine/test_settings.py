"""Engine settings given as text."""

from __future__ import annotations

import pytest

from observability.engine.settings import parse_settings, with_settings
from observability.engine.types import ControllerConfig, EngineConfig
from observability.errors import ConfigError


def test_settings_are_read_by_their_type():
    given = parse_settings(
        ["num_host_blocks=4096", "compaction_seconds=0.002", "class_queues=off", "reservation=grow", "num_blocks=none"]
    )
    assert given == {
        "num_host_blocks": 4096,
        "compaction_seconds": 0.002,
        "class_queues": False,
        "reservation": "grow",
        "num_blocks": None,
    }
    config = with_settings(EngineConfig(), parse_settings(["num_host_blocks=4096"]))
    assert config == EngineConfig(num_host_blocks=4096)


def test_the_controller_is_switched_on_by_name_or_by_any_of_its_settings():
    assert parse_settings(["controller=on"]) == {"controller": ControllerConfig()}
    assert parse_settings(["controller.patience=5"]) == {"controller": ControllerConfig(patience=5)}
    assert parse_settings(["controller=off"]) == {}


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (["num_host_blocks"], "is no setting"),
        (["warp=9"], "no engine setting 'warp'"),
        (["controller.warp=9"], "no engine setting 'controller.warp'"),
        (["num_host_blocks=many"], "num_host_blocks = 'many' is not valid"),
        (["spread_limit="], "spread_limit = '' is not valid"),
        (["reservation=all"], "reservation = 'all' is not valid"),
        (["controller=off", "controller.patience=5"], "controller is off"),
        (["controller.p99_low_seconds=2"], "out of order"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_by_name(pairs, message):
    with pytest.raises(ConfigError, match=message):
        parse_settings(pairs)


def test_settings_that_contradict_the_configuration_are_refused():
    with pytest.raises(ConfigError, match="prefetch_lookahead = 3 and num_host_blocks = 1 contradict"):
        with_settings(EngineConfig(), {"num_host_blocks": 1})
