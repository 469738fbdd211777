"""The class that vLLM loads: light to install, found by its entry point, and never in vLLM's way, whatever its settings are."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from exporters.vllm import exposition
from tests.conftest import REPO
from tests.vllm.harness import finished, iteration, scheduler

_HEAVY = (
    "torch", "transformers", "streamlit", "plotly", "pandas", "prophet", "scipy", "sklearn", "gguf", "tokenizers", "safetensors",
    "matplotlib", "selenium", "vllm",
)  # fmt: skip
_PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]


def _name(requirement: str) -> str:
    return re.split(r"[\s\[;<>=!~(]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def test_the_extra_brings_no_model_app_plot_or_forecast_package_and_not_vllm_itself() -> None:
    wanted = {_name(r) for r in (*_PROJECT["dependencies"], *_PROJECT["optional-dependencies"]["vllm"])}
    seen: set[str] = set()
    while wanted:
        seen.add(name := wanted.pop())
        try:
            wanted |= {_name(r) for r in requires(name) or () if "extra ==" not in r} - seen
        except PackageNotFoundError:  # of another platform or Python
            continue
    assert {"msgspec", "pyzmq", "prometheus-client"} <= seen
    assert not seen & set(_HEAVY)
    assert len(seen) < 60


def test_the_entry_point_names_the_class() -> None:
    (value,) = _PROJECT["entry-points"]["vllm.stat_logger_plugins"].values()
    assert value == "exporters.vllm.plugin:KvscopeStatLogger"


def test_it_imports_where_nothing_heavy_is_installed() -> None:
    code = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {_HEAVY!r} and name not in sys.modules:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import exporters.vllm.recorder, exporters.vllm.exposition, exporters.vllm.kv_events, exporters.vllm.residency
assert not set({_HEAVY!r}) & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], cwd=REPO, env={"PYTHONPATH": str(REPO)}, check=True, timeout=120)


@pytest.fixture
def logger_class(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The class over modules that look like vLLM's; what it registers is taken away again."""

    class Base:
        pass

    class OutputProcessor:
        def __init__(self) -> None:
            self.request_states: dict[str, Any] = {}

        def add_request(self, request: Any, prompt: Any) -> None:
            self.request_states[request.request_id] = None

        def abort_requests(self, ids: Any, internal: bool) -> list[str]:
            return [i for i in ids if self.request_states.pop(i, self) is not self]

    class IterationStats:
        def update_from_events(self, *_: Any) -> None: ...

    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "9.9"}, "vllm.v1": {}, "vllm.v1.metrics": {}, "vllm.v1.engine": {},
        "vllm.v1.metrics.loggers": {"AggregateStatLoggerBase": Base}, "vllm.v1.metrics.stats": {"IterationStats": IterationStats},
        "vllm.v1.engine.output_processor": {"OutputProcessor": OutputProcessor},
    }  # fmt: skip
    for name, attributes in contents.items():
        module = ModuleType(name)
        module.__dict__.update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "exporters.vllm.plugin", raising=False)
    yield importlib.import_module("exporters.vllm.plugin").KvscopeStatLogger
    if (shown := exposition._registered.pop(REGISTRY, None)) is not None:
        REGISTRY.unregister(shown)
    sys.modules.pop("exporters.vllm.plugin", None)


def config(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{
        "cache_config": SimpleNamespace(block_size=16, num_gpu_blocks=101, enable_prefix_caching=True, cache_dtype="auto"),
        "scheduler_config": SimpleNamespace(policy="fcfs"), "model_config": SimpleNamespace(served_model_name="smol"),
        "device_config": SimpleNamespace(device_type="cpu"), "kv_transfer_config": None, "kv_events_config": None,
        "parallel_config": SimpleNamespace(_api_process_count=1, _api_process_rank=0),
        "observability_config": SimpleNamespace(kv_cache_metrics=False), **changes,
    })  # fmt: skip


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"model": "smol", "engine": "0", **labels})


def test_vllm_s_settings_become_labels_and_sizes(logger_class: Any) -> None:
    logger = logger_class(vllm_config=config(), engine_indexes=[0])
    logger.log_engine_initialized()
    logger.record(scheduler(), iteration(finished_requests=[finished()]), mm_cache_stats=None, engine_idx=0)
    logger.record_admission_rejection("max_num_queued_reqs")
    assert value("kvscope_kv_capacity_blocks") == 100
    assert value("kvscope_kv_block_size_tokens") == 16
    assert value("kvscope_requests_total", outcome="length", **{"class": "standard"}) == 1
    assert value("kvscope_requests_total", outcome="rejected", **{"class": "standard"}) == 1
    assert (
        value("kvscope_engine_info", executor="vllm", clock="real", device="cpu", kv_dtype="auto", version="9.9") == 1
    )


def test_a_pool_whose_size_is_known_late_is_shown_once_it_is(logger_class: Any) -> None:
    unsized = config(cache_config=SimpleNamespace(block_size=16, num_gpu_blocks=None, enable_prefix_caching=True))
    logger = logger_class(unsized, [0])
    logger.record(scheduler(), None)
    assert value("kvscope_kv_capacity_blocks") is None
    assert value("kvscope_kv_blocks", state="active") is None
    unsized.cache_config.num_gpu_blocks = 11
    logger.log_engine_initialized()
    logger.record(scheduler(kv_cache_usage=0.5), None)
    assert value("kvscope_kv_capacity_blocks") == 10
    assert value("kvscope_kv_blocks", state="active") == 5


def test_without_a_front_end_that_it_knows_aborts_and_arrivals_are_absent(
    logger_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.output_processor", ModuleType("renamed"))
    logger = logger_class(config(), [0])
    logger.record(scheduler(), iteration(finished_requests=[finished()]))
    assert value("kvscope_requests_received_total", **{"class": "standard"}) is None
    assert value("kvscope_requests_total", outcome="abort", **{"class": "standard"}) is None
    assert value("kvscope_requests_total", outcome="length", **{"class": "standard"}) == 1
    marked = {"source": "vllm", "family": "kvscope_requests_received", "status": "no"}
    assert value("kvscope_source_family_info", reason="vLLM's front end was not found", **marked) == 1


@pytest.mark.parametrize("broken", [None, object(), 7, "text", SimpleNamespace()])
@pytest.mark.parametrize("part", ["whole", *vars(config())])
def test_no_settings_of_vllm_make_it_raise(logger_class: Any, part: str, broken: Any) -> None:
    logger = logger_class(broken if part == "whole" else config(**{part: broken}), [0])
    logger.log_engine_initialized()
    logger.record(scheduler(), iteration(finished_requests=[finished()]), mm_cache_stats=None, engine_idx=0)
    logger.record()
    logger.record(1, 2, 3, 4, 5, six=6)
    logger.record_admission_rejection("any")


def test_kv_events_that_vllm_does_not_publish_are_not_waited_for(logger_class: Any) -> None:
    off = SimpleNamespace(
        enable_kv_cache_events=False, publisher="null", endpoint="tcp://*:5557", replay_endpoint=None, topic=""
    )
    logger_class(config(kv_events_config=off), [0])
    told = {"source": "vllm", "family": "kvscope_kv_live_blocks", "status": "no"}
    assert value("kvscope_source_family_info", reason="needs KV events (--kv-events-config)", **told) == 1
