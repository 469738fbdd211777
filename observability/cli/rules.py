"""`kvscope rules`: writes the Prometheus rules to a folder, checks them, has a Prometheus load them, and uploads them to a ruler."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from observability.errors import ConfigError, KvscopeError, ServiceError

if TYPE_CHECKING:
    from observability.cli._http import Api

Json = dict[str, Any]
RECORDING, ALERTS = "kvscope-recording.yml", "kvscope-alerts.yml"
#: Groups whose name begins so are ours to remove from the namespace of a ruler.
OURS = "kvscope-"


def files(grafana_url: str | None = None) -> dict[str, str]:
    """Path below a folder -> rule file: recordings, alerts, and adapters/ENGINE.yml for each other engine. Links of alerts
    lead to the Grafana at `grafana_url`."""
    from alerts import adapters, rules
    from alerts.links import GRAFANA_URL

    out = {RECORDING: rules.recording_file(), ALERTS: rules.alert_file((grafana_url or GRAFANA_URL).rstrip("/"))}
    folder = f"{Path(adapters.FOLDER).parent}/"
    return out | {name.removeprefix(folder): text for name, text in adapters.rule_files().items()}


def chosen(engines: Iterable[str] | None, grafana_url: str | None = None) -> dict[str, str]:
    """`files()` of the signals, the alerts, and those engines alone (all if none is named). Raises ConfigError."""
    from exporters.adapters.engines import BUNDLED, TITLES

    every = files(grafana_url)
    if not engines:
        return every
    for engine in engines:
        if engine not in TITLES:
            raise ConfigError(f"There is no engine {engine!r}.", next_step=f"Choose from {', '.join(TITLES)}.")
    return {name: every[name] for name in (RECORDING, ALERTS, *(f"adapters/{e}.yml" for e in engines if e != BUNDLED))}


def groups_of(texts: dict[str, str]) -> dict[str, Json]:
    """Rule groups by name, of several files."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return {group["name"]: group for text in texts.values() for group in yaml.load(text, Loader=loader)["groups"]}


def as_prometheus_rule(name: str, text: str) -> tuple[str, str]:
    """A rule file as a PrometheusRule of the Prometheus operator: (file name, YAML)."""
    from dashboards.kubernetes import prometheus_rule

    stem = Path(name).stem if Path(name).stem.startswith(OURS) else f"{OURS}{Path(name).stem}"
    return f"{stem}.yaml", prometheus_rule(stem, text)


# -- check ----------------------------------------------------------------------------------------------------------


def faults(folder: Path, names: Iterable[str]) -> dict[str, list[str]]:
    """By file: what is wrong with it as rules for a Prometheus with kvscope's exporters."""
    import yaml

    from observability.cli._files import known_series, unknown_series

    known = known_series()
    out: dict[str, list[str]] = {}
    texts = {name: (folder / name).read_text(encoding="utf-8", errors="replace") for name in names}
    parsed: dict[str, list[Json]] = {}
    for name, text in texts.items():
        found = out.setdefault(name, [])
        try:
            body = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
            rules = [rule for group in body["groups"] for rule in group["rules"]]
            assert all(isinstance(rule, dict) for rule in rules)
        except (yaml.YAMLError, TypeError, KeyError, AssertionError) as error:
            found.append(f"is no rule file: {' '.join(str(error).split())[:200] or 'rules are not mappings'}")
            continue
        parsed[name] = rules
        known |= {str(rule["record"]) for rule in rules if "record" in rule}
    for name, rules in parsed.items():
        for rule in rules:
            if unknown := unknown_series(str(rule.get("expr", "")), known):
                out[name].append(
                    f"{rule.get('alert') or rule.get('record')} asks for {', '.join(unknown)}, which nothing exports or records"
                )
    promtool = shutil.which("promtool")
    for name in parsed if promtool else ():
        done = subprocess.run(
            [str(promtool), "check", "rules", str(folder / name)], capture_output=True, text=True, timeout=60
        )
        if done.returncode:
            out[name] += [
                f"promtool: {line.strip()}"
                for line in (done.stdout + done.stderr).splitlines()
                if "SUCCESS" not in line
            ][1:6]
    return out


# -- servers --------------------------------------------------------------------------------------------------------

_PROMETHEUS_HINTS = {
    403: "Start Prometheus with --web.enable-lifecycle, or send it SIGHUP instead.",
    405: "Start Prometheus with --web.enable-lifecycle, or send it SIGHUP instead.",
    401: "Set KVSCOPE_PROMETHEUS_TOKEN to a token that the proxy before Prometheus takes.",
    500: "Run `promtool check config` on its configuration: Prometheus goes on with the old one.",
}
_RULER_HINTS = {
    401: "Set KVSCOPE_RULER_TOKEN, and --user where the service asks for a user, as Grafana Cloud does.",
    403: "Give the token the right to write rules.",
    404: "Check --path: /prometheus/config/v1/rules for Mimir, /api/v1/rules for Cortex; and that the ruler API is on.",
}


def loaded(api: Api, groups: dict[str, Json]) -> dict[str, str]:
    """Each of `groups` as a Prometheus has it: loaded, missing, differs (other rules), or the error of a rule that fails."""
    _, body = api.json("GET", "/api/v1/rules")
    try:
        there = {group["name"]: group["rules"] for group in body["data"]["groups"]}
        out = {}
        for name, group in groups.items():
            rules = there.get(name)
            errors = [f"{rule['name']}: {rule['lastError']}" for rule in rules or () if rule.get("lastError")]
            same = [rule.get("record") or rule["alert"] for rule in group["rules"]] == [r["name"] for r in rules or ()]
            out[name] = "missing" if rules is None else errors[0] if errors else "loaded" if same else "differs"
    except (KeyError, TypeError, AttributeError):
        raise ServiceError(f"{api.base} is not a Prometheus.", next_step="Give the address of a Prometheus.") from None
    return out


def upload(api: Api, path: str, namespace: str, groups: dict[str, Json], *, dry_run: bool) -> dict[str, str]:
    """Writes `groups` into a namespace of a Mimir or Cortex ruler, and removes those groups of ours there that are not among them.
    Group -> current, created, replaced or removed (with `dry_run`: would be). Raises ServiceError at the first refusal."""
    import yaml

    answer = api.send("GET", f"{path}/{namespace}", accept=(200, 404))
    try:
        body = yaml.safe_load(answer.text) if answer.status_code == 200 else {}
        there = {group["name"]: group for group in (body or {}).get(namespace) or ()}
    except (yaml.YAMLError, AttributeError, KeyError, TypeError):
        raise ServiceError(
            f"{api.base}{path}/{namespace} answers with something that is no list of rule groups.",
            next_step=_RULER_HINTS[404],
        ) from None
    if answer.status_code == 404 and "no rule groups found" not in answer.text and "does not exist" not in answer.text:
        raise ServiceError(f"{api.base}{path}/{namespace}: 404.", next_step=_RULER_HINTS[404])
    done: dict[str, str] = {}
    for name, group in groups.items():
        if name in there and _same(there[name], group):
            done[name] = "current"
            continue
        done[name] = "replaced" if name in there else "created"
        if not dry_run:
            text = yaml.safe_dump(group, sort_keys=False, width=10_000)
            api.send(
                "POST",
                f"{path}/{namespace}",
                accept=(200, 201, 202),
                content=text,
                headers={"Content-Type": "application/yaml"},
            )
    for name in there:
        if name.startswith(OURS) and name not in groups:
            done[name] = "removed"
            if not dry_run:
                api.send("DELETE", f"{path}/{namespace}/{name}", accept=(200, 202, 204))
    return {name: f"would be {word}" if dry_run and word != "current" else word for name, word in done.items()}


def _same(a: Json, b: Json) -> bool:
    keys = ("record", "alert", "expr", "labels", "annotations")

    def told(group: Json) -> list[list[Any]]:
        return [[rule.get(key) or None for key in keys] for rule in group.get("rules") or ()]

    return told(a) == told(b)


# -- commands -------------------------------------------------------------------------------------------------------

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Engines = Annotated[
    list[str] | None,
    typer.Option(
        "--engine", help="Only signals, alerts and this engine's rules. Again for more; kvscope alone: no other engine."
    ),
]
GrafanaUrl = Annotated[
    str | None,
    typer.Option(help="Where Grafana is reached; links of alerts lead there. [default: http://127.0.0.1:3000]"),
]
Timeout = Annotated[float, typer.Option(min=0.1, max=300, help="Seconds that one request may take.")]
commands = typer.Typer(
    no_args_is_help=True, help="Write, check, load and upload the Prometheus recording and alerting rules."
)


def register(app: typer.Typer) -> None:
    app.add_typer(commands, name="rules")


def _grafana(url: str | None) -> str | None:
    from observability.cli._http import base_url

    return None if url is None else base_url(url, "--grafana-url")


@commands.command("write")
def write_rules(
    folder: Annotated[Path, typer.Argument(help="Folder to write to.", file_okay=False)],
    engine: Engines = None,
    grafana_url: GrafanaUrl = None,
    kubernetes: Annotated[
        bool, typer.Option("--kubernetes", help="As PrometheusRule resources of the Prometheus operator.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write the rule files: recordings, alerts, and the recordings of other engines.

    Examples:

        kvscope rules write /etc/prometheus/rules --engine kvscope --grafana-url https://grafana.example.com

        kvscope rules write ./rules --engine vllm --engine sglang

        kvscope rules write ./manifests --engine vllm --kubernetes
    """
    from observability.cli._files import compare, write
    from observability.cli.boards import show

    made = chosen(engine, _grafana(grafana_url))
    if kubernetes:
        made = dict(as_prometheus_rule(name, text) for name, text in made.items())
    state = compare(folder, made)
    write(folder, made, state)
    show(state, as_json)


@commands.command("check")
def check_rules(
    folder: Annotated[Path, typer.Argument(help="Folder with rule files.", file_okay=False)],
    grafana_url: GrafanaUrl = None,
    as_json: AsJson = False,
) -> None:
    """Say which rule files of a folder are what this version makes, and what is wrong with those that are not, yours included: files
    that are no rules, series that nothing exports or records, and what promtool finds where it is installed.

    Exit code: 0 all rules work with this version (edited ones too), 1 something is wrong.

    Examples:

        kvscope rules check /etc/prometheus/rules

        kvscope rules check ./rules --grafana-url https://grafana.example.com --json
    """
    from observability.cli._files import compare

    names = [
        path.relative_to(folder).as_posix() for pattern in ("*.yml", "*/*.yml") for path in sorted(folder.glob(pattern))
    ]
    if not names:
        raise ConfigError(f"{folder} has no rule file.", next_step=f"Run `kvscope rules write {folder}` first.")
    made = files(_grafana(grafana_url))
    state = compare(folder, {name: made[name] for name in names if name in made})
    found = faults(folder, names)
    rows = {
        name: {"state": state.get(name, "yours").replace("stale", "differs"), "faults": found[name]} for name in names
    }
    if as_json:
        typer.echo(json.dumps({"promtool": shutil.which("promtool") is not None, "files": rows}, indent=1))
    else:
        for name, row in rows.items():
            typer.echo("\n".join([f"{row['state']:8} {name}", *(f"         {fault}" for fault in row["faults"])]))
        if shutil.which("promtool") is None:
            typer.echo("promtool is not installed: syntax was not checked.", err=True)
    bad = [name for name in names if found[name]]
    if bad:
        raise KvscopeError(
            f"{len(bad)} of {len(names)} rule files do not work with this version: {', '.join(bad)}.",
            next_step="Correct them, or write them again with `kvscope rules write`.",
        )


@commands.command("reload")
def reload_rules(
    url: Annotated[str, typer.Option(help="Address of the Prometheus.")],
    engine: Engines = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say which rules it has loaded.")] = False,
    token: Annotated[
        str | None,
        typer.Option(envvar="KVSCOPE_PROMETHEUS_TOKEN", help="Bearer token for a proxy before it.", show_default=False),
    ] = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Have a Prometheus read its rule files again, then say which rule groups it has: loaded, missing, differs, or a rule's error.
    Prometheus must run with --web.enable-lifecycle.

    Exit code: 0 every group is loaded, 1 not.

    Examples:

        kvscope rules reload --url http://127.0.0.1:9090 --engine kvscope

        kvscope rules reload --url http://127.0.0.1:9090 --engine vllm --dry-run --json
    """
    from observability.cli._http import Api, base_url
    from observability.cli.boards import show

    headers = {"Authorization": f"Bearer {token}"} if token else {}
    groups = groups_of(chosen(engine))
    with Api("a Prometheus", base_url(url), headers=headers, seconds=timeout, hints=_PROMETHEUS_HINTS) as api:
        if not dry_run:
            api.send("POST", "/-/reload")
        state = loaded(api, groups)
    show(state, as_json)
    lacking = [name for name, word in state.items() if word != "loaded"]
    if lacking:
        raise KvscopeError(
            f"{len(lacking)} of {len(groups)} rule groups are not loaded as this version makes them.",
            next_step="Check rule_files in its configuration, and the files with `kvscope rules check`.",
        )


@commands.command("upload")
def upload_rules(
    url: Annotated[str, typer.Option(help="Address of the Mimir or Cortex.")],
    engine: Engines = None,
    namespace: Annotated[str, typer.Option(help="Namespace of the rules there.")] = "kvscope",
    path: Annotated[
        str, typer.Option(help="Path of the ruler's API: this one for Mimir, /api/v1/rules for Cortex.")
    ] = "/prometheus/config/v1/rules",
    tenant: Annotated[str | None, typer.Option(help="Tenant, sent as X-Scope-OrgID.", show_default=False)] = None,
    user: Annotated[
        str | None, typer.Option(help="User of basic authentication, with the token as password.", show_default=False)
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(envvar="KVSCOPE_RULER_TOKEN", help="Token. Better in the environment.", show_default=False),
    ] = None,
    grafana_url: GrafanaUrl = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing; say what would be done.")] = False,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Upload the rules to the ruler of a Mimir or Cortex, group by group; groups named kvscope-* that are not made any more are removed
    from the namespace.

    Examples:

        kvscope rules upload --url http://mimir:8080 --tenant team-a --engine vllm --dry-run

        kvscope rules upload --url https://prometheus-prod.grafana.net --path /api/prom/config/v1/rules --user 12345

        kvscope rules upload --url http://cortex:9009 --path /api/v1/rules --json
    """
    from urllib.parse import quote

    from observability.cli._http import Api, base_url
    from observability.cli.boards import show

    if user and not token:
        raise ConfigError("--user needs a token.", next_step=_RULER_HINTS[401])
    headers = {"X-Scope-OrgID": tenant} if tenant else {}
    if token and not user:
        headers["Authorization"] = f"Bearer {token}"
    base = base_url(url)
    groups = groups_of(chosen(engine, _grafana(grafana_url)))
    auth = (user, token) if user and token else None
    with Api("a ruler", base, headers=headers, auth=auth, seconds=timeout, hints=_RULER_HINTS) as api:
        show(upload(api, "/" + path.strip("/"), quote(namespace, safe=""), groups, dry_run=dry_run), as_json)
