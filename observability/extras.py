"""Which extra of the package brings a module that the light installation lacks. A table; pyproject.toml holds the other side."""

from __future__ import annotations

from importlib.util import find_spec

#: Module that is imported -> extra that installs it.
EXTRA_OF = {
    "torch": "engine", "tokenizers": "engine", "safetensors": "engine", "gguf": "engine", "jinja2": "engine",
    "scipy": "engine", "uhashring": "engine", "zstandard": "engine", "google.protobuf": "engine",
    "streamlit": "app", "plotly": "app", "pandas": "forecast", "prophet": "forecast", "distributed": "scale",
    "opentelemetry.sdk": "otlp", "pynvml": "gpu", "msgspec": "vllm", "zmq": "vllm", "pyroscope": "profile",
}  # fmt: skip


def extra_for(module: str) -> str | None:
    """The extra that installs `module` (dotted); None if none does."""
    while module:
        if module in EXTRA_OF:
            return EXTRA_OF[module]
        module = module.rpartition(".")[0]
    return None


def installed() -> dict[str, bool]:
    """Extra -> whether every module that it brings can be found here."""
    out: dict[str, bool] = {}
    for module, extra in EXTRA_OF.items():
        out[extra] = out.get(extra, True) and _found(module)
    return out


def _found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False
