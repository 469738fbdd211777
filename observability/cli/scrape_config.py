"""`kvscope scrape-config`: the part of a Prometheus configuration that reads engines and loads kvscope's rules for them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from observability.errors import ConfigError

EXAMPLES = """
Examples:

  kvscope scrape-config --engine vllm --target 10.0.0.5:8000 --target 10.0.0.6:8000

  kvscope scrape-config --engine kvscope --engine sglang --target kvscope=127.0.0.1:8000 --target sglang=10.0.0.7:30000

  kvscope scrape-config --engine llamacpp --target 127.0.0.1:8080 --model qwen3-8b --rules ./monitoring > prometheus.yml
"""
#: More than any engine's page; a page that is larger fails its scrape instead of flooding the database.
BODY_LIMIT = "64MB"


def by_engine(engines: list[str], values: list[str], option: str) -> dict[str, list[str]]:
    """Values of an option by engine: `engine=value`, or the value alone where there is one engine. Raises ConfigError."""
    out: dict[str, list[str]] = {engine: [] for engine in engines}
    for value in values:
        engine, equals, rest = value.partition("=")
        if equals and engine in out:
            out[engine].append(rest)
        elif len(out) == 1:
            out[engines[0]].append(value)
        else:
            raise ConfigError(
                f"{option} {value!r} does not say which engine it is for.",
                next_step=f"With several engines write {option} ENGINE=VALUE, such as {option} {engines[0]}={value}.",
            )
    return out


def config(targets: dict[str, list[str]], models: dict[str, list[str]], rules: Path) -> dict[str, Any]:
    """The configuration as data, from targets (host:port) and model names by engine; `rules` is the folder that
    `kvscope rules write` wrote to. Raises ConfigError for what Prometheus or the engine's rules could not work with."""
    from alerts.links import JOB
    from alerts.rules import INTERVAL
    from exporters.adapters.engines import ADAPTERS, BUNDLED, TITLES

    jobs = []
    files = ["kvscope-recording.yml", "kvscope-alerts.yml"]
    for engine, addresses in targets.items():
        if engine not in TITLES:
            raise ConfigError(f"There is no engine {engine!r}.", next_step=f"Choose from {', '.join(TITLES)}.")
        adapter = ADAPTERS.get(engine)
        static: dict[str, Any] = {"targets": [_address(address) for address in addresses]}
        if not addresses:
            raise ConfigError(
                f"No target for {engine}.", next_step=f"Add --target host:{adapter.port if adapter else 8000}."
            )
        given = models.get(engine, [])
        if adapter is not None and not adapter.model_label:
            if len(given) != 1:
                raise ConfigError(
                    f"{adapter.title} does not name its model in its metrics.",
                    next_step="Give exactly one --model; for servers of different models run the command once a model.",
                )
            static["labels"] = {"model": _label(given[0])}
        elif given:
            raise ConfigError(f"{TITLES[engine]} names its models itself.", next_step="Leave --model out for it.")
        jobs.append(
            {
                "job_name": JOB if engine == BUNDLED else f"{JOB}-{engine}",
                "metrics_path": adapter.path if adapter else "/metrics",
                "scrape_interval": INTERVAL,
                "scrape_timeout": "10s",
                "body_size_limit": BODY_LIMIT,
                "static_configs": [static],
            }
        )
        if engine != BUNDLED:
            files.append(f"adapters/{engine}.yml")
    return {
        "global": {"scrape_interval": INTERVAL, "evaluation_interval": INTERVAL},
        "rule_files": [str(rules / file) for file in files],
        "scrape_configs": jobs,
    }


def _label(model: str) -> str:
    if not model or len(model) > 128 or not model.isprintable():
        raise ConfigError(f"{model!r} cannot be a label.", next_step="Give a model name of at most 128 characters.")
    return model


def _address(target: str) -> str:
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})", target)
    if match is None or not 0 < int(match[2]) < 65536:
        raise ConfigError(
            f"{target!r} is not host:port.", next_step="Give a target such as 10.0.0.5:8000, without http:// and path."
        )
    return target


def register(app: typer.Typer) -> None:
    @app.command("scrape-config", epilog=EXAMPLES)
    def scrape_config(
        engine: Annotated[
            list[str],
            typer.Option(
                help="Engine to scrape: kvscope, vllm, vllm-plugin, sglang, llamacpp, trtllm, triton, tgi, dynamo or ray. "
                "Again for more."
            ),
        ],
        target: Annotated[
            list[str],
            typer.Option(help="host:port of a server, or ENGINE=host:port with several engines. Again for more."),
        ],
        model: Annotated[
            list[str] | None,
            typer.Option(help="Model name for engines whose metrics name none (llamacpp, tgi), or ENGINE=NAME."),
        ] = None,
        rules: Annotated[Path, typer.Option(help="Folder that `kvscope rules write` wrote to.")] = Path("/etc/kvscope"),
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Print a Prometheus configuration: the scrape jobs and rule files for the engines named."""
        import yaml

        engines = list(dict.fromkeys(engine))
        out = config(by_engine(engines, target, "--target"), by_engine(engines, model or [], "--model"), rules)
        typer.echo(
            json.dumps(out, indent=1) if as_json else yaml.safe_dump(out, sort_keys=False, width=200), nl=as_json
        )
