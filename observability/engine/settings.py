"""Engine settings from text, as a command line or a file gives them: `num_host_blocks=4096`, `controller.p99_high_seconds=0.5`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from observability.engine.types import ControllerConfig, EngineConfig
from observability.errors import ConfigError

_CONTROLLER = "controller"


def parse_settings(pairs: Iterable[str]) -> dict[str, Any]:
    """Values of EngineConfig fields from `name=value` pairs; `controller=on` and `controller.name=value` make a ControllerConfig.

    Raises ConfigError that names the setting: unknown, malformed, of the wrong type, or contradicting another of the controller's.
    """
    settings: dict[str, Any] = {}
    control: dict[str, Any] = {}
    switched: bool | None = None
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise ConfigError(f"{pair!r} is no setting.", next_step="Write name=value, such as num_host_blocks=4096.")
        if name == _CONTROLLER:
            switched = _value(name, text, bool)
        elif name.startswith(f"{_CONTROLLER}."):
            control |= _field(ControllerConfig, name.removeprefix(f"{_CONTROLLER}."), text, f"{_CONTROLLER}.")
        else:
            settings |= _field(EngineConfig, name, text, "")
    if switched is False and control:
        raise ConfigError(
            "controller is off, and it has settings.", next_step="Leave them out, or leave controller=off out."
        )
    if switched or control:
        settings[_CONTROLLER] = ControllerConfig(**control)
    return settings


def with_settings(config: EngineConfig, settings: dict[str, Any]) -> EngineConfig:
    """`config` with other values. Raises ConfigError where they contradict each other."""
    return replace(config, **settings) if settings else config


def _field(config: type, name: str, text: str, prefix: str) -> dict[str, Any]:
    known = [f.name for f in fields(config) if f.name != _CONTROLLER]
    if name not in known:
        raise ConfigError(
            f"There is no engine setting {prefix + name!r}.", next_step=f"Use one of {', '.join(sorted(known))}."
        )
    return {name: _value(prefix + name, text, get_type_hints(config)[name])}


def _value(name: str, text: str, kind: Any) -> Any:
    try:
        return TypeAdapter(kind).validate_python(None if text.lower() == "none" else text)
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"]
        raise ConfigError(
            f"Engine setting {name} = {text!r} is not valid: {reason}.", next_step=f"Give {name} another value."
        ) from None
