"""The class that vLLM instantiates (entry point group `vllm.stat_logger_plugins`). Nothing in it raises into vLLM.

The only module of kvscope that imports vLLM.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from exporters.vllm.capabilities import families
from exporters.vllm.exposition import Exposition
from exporters.vllm.frontend import Frontend, install
from exporters.vllm.recorder import Recorder, Settings
from exporters.vllm.siblings import Siblings
from observability import catalog as c
from observability.telemetry.observed import Source

if TYPE_CHECKING:
    from exporters.vllm.kv_events import KVEvents

_log = logging.getLogger(__name__)


class KvscopeStatLogger(AggregateStatLoggerBase):
    """Fills kvscope's families from what vLLM records and puts them on vLLM's /metrics."""

    def __init__(self, vllm_config: Any, engine_indexes: Any = None) -> None:
        self._recorder: Recorder | None = None
        self._config = vllm_config
        try:
            self._recorder = _recorder(vllm_config, list(engine_indexes or [0]))
            self._exposition = Exposition(self._recorder.observed)
        except Exception:
            self._recorder = None
            _log.exception("kvscope's plug-in could not start; vLLM runs without it")

    def record(
        self,
        scheduler_stats: Any = None,
        iteration_stats: Any = None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
        *_: Any,
        **__: Any,
    ) -> None:
        if self._recorder is not None:
            self._recorder.record(scheduler_stats, iteration_stats, engine_idx)

    def record_admission_rejection(self, reason: str) -> None:
        if self._recorder is not None:
            self._recorder.rejected()

    def log_engine_initialized(self) -> None:
        """The size of the KV pool is known by now."""
        try:
            if self._recorder is not None:
                self._recorder.set_pool(*_pool(self._config))
        except Exception:
            _log.exception("kvscope cannot read the size of vLLM's KV pool")


def _pool(config: Any) -> tuple[int | None, int | None]:
    """Blocks and tokens of a block. Prefixes hit in units of the block size that vLLM resolved for attention."""
    cache = getattr(config, "cache_config", None)
    sizes = (getattr(cache, name, None) for name in ("hash_block_size", "effective_attention_block_size", "block_size"))
    blocks = getattr(cache, "num_gpu_blocks", None)
    size = next((size for size in sizes if type(size) is int and size > 0), None)
    return (blocks if type(blocks) is int else None), size


def _recorder(config: Any, engines: list[int]) -> Recorder:
    import vllm

    cache = getattr(config, "cache_config", None)
    scheduler = getattr(config, "scheduler_config", None)
    model = getattr(getattr(config, "model_config", None), "served_model_name", None)
    device = getattr(getattr(config, "device_config", None), "device_type", "unknown")
    priorities = str(getattr(scheduler, "policy", "fcfs")) == "priority"
    blocks, block_size = _pool(config)
    settings = Settings(
        block_size=block_size,
        capacity_blocks=blocks,
        priorities=priorities,
        connector=getattr(config, "kv_transfer_config", None) is not None,
        several_processes=_several_processes(config),
    )
    holder: list[Recorder] = []
    classes = c.CLASSES if priorities else ("standard",)
    frontend = Frontend(
        classes,
        on_received=lambda index: holder[0].received(index),
        on_abort=lambda request: holder[0].aborted(request),
        on_fault=lambda what: holder[0].fault(what),
    )
    requests, preempted = _install(frontend)
    events = _kv_events(config, engines)
    states = (c.FRONTEND_STATE, "queued", "prefill", "decode", *(("preempted",) if preempted else ()))
    source = Source(
        model=str(model if not isinstance(model, list) else model[0]),
        executor="vllm",
        device=str(device),
        kv_dtype=str(getattr(cache, "cache_dtype", "unknown")),
        version=str(getattr(vllm, "__version__", "unknown")),
        families=families(
            prefix_cache=bool(getattr(cache, "enable_prefix_caching", False)),
            frontend=requests,
            events=bool(events),
            sampled=bool(getattr(getattr(config, "observability_config", None), "kv_cache_metrics", False)),
        ),
        classes=classes if requests else ((c.UNTOLD,) if priorities else ("standard",)),
        class_of_totals=c.UNTOLD if priorities else "standard",
        states=states,
        outcomes=("stop", "length", *(("abort",) if requests else ()), "error", "rejected"),
        tiers=(c.UNTOLD,) if settings.connector else ("device",),
    )
    shared = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    recorder = Recorder(source, settings, engines, Siblings(Path(shared)) if shared else None)
    holder.append(recorder)
    recorder.follow(events)
    for reader in events.values():
        reader.start()
    if requests:
        recorder.watch(frontend)
    return recorder


def _install(frontend: Frontend) -> tuple[bool, bool]:
    try:
        from vllm.v1.engine.output_processor import OutputProcessor
        from vllm.v1.metrics.stats import IterationStats

        return install(frontend, OutputProcessor, IterationStats)
    except Exception:
        _log.warning("kvscope does not know the front end of this vLLM: aborts and arrivals stay absent", exc_info=True)
        return False, False


def _kv_events(config: Any, engines: list[int]) -> dict[int, KVEvents]:
    """A reader for each engine, where vLLM publishes KV events; of several API server processes the first one reads."""
    settings: Any = getattr(config, "kv_events_config", None)
    parallel = getattr(config, "parallel_config", None)
    if not getattr(settings, "enable_kv_cache_events", False) or getattr(settings, "publisher", None) != "zmq":
        return {}
    if (getattr(parallel, "_api_process_rank", 0) or 0) > 0:
        return {}
    try:
        from exporters.vllm.kv_events import KVEvents, address_of

        found = {}
        for index in engines:
            if endpoint := address_of(settings.endpoint, index):
                replay = address_of(getattr(settings, "replay_endpoint", None), index)
                found[index] = KVEvents(endpoint, replay, getattr(settings, "topic", "") or "")
        return found
    except Exception:
        _log.warning("kvscope cannot read the KV events of this vLLM", exc_info=True)
        return {}


def _several_processes(config: Any) -> bool:
    parallel = getattr(config, "parallel_config", None)
    return "PROMETHEUS_MULTIPROC_DIR" in os.environ or (getattr(parallel, "_api_process_count", 1) or 1) > 1
