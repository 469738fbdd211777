"""Each extra alone: what its packages are for imports with them and without any other extra's, by the metadata of what is installed here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement

from observability.extras import EXTRA_OF, extra_for
from tests.conftest import REPO

#: Modules by their first matching prefix -> the extras that they need. What matches none is in the light installation.
NEEDS = {
    "exporters.otlp": "otlp",
    "exporters.forecast": "forecast",
    "exporters.vllm.kv_events": "vllm",
    "exporters.vllm.plugin": None,  # imports vLLM itself, which loads it: tests/vllm_live
    "observability.forecast": "forecast",
    "observability.store": "forecast",
    "observability.app.main": None,  # no module but the script that Streamlit runs, with a source: tests/app
    "observability.app": "app",
    "observability.engine": "engine",
    "observability.workload": "engine,forecast",
    "pynvml": "gpu",
    "pyroscope": "profile",
    "distributed": "scale",
}
HEAVY = {
    "torch",
    "numpy",
    "pandas",
    "scipy",
    "streamlit",
    "plotly",
    "grafanalib",
    "transformers",
    "prophet",
    "matplotlib",
}


def modules() -> list[str]:
    found = []
    for part in ("observability", "exporters", "dashboards", "alerts"):
        for path in sorted((REPO / part).rglob("*.py")):
            name = ".".join(path.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__")
            if not name.endswith("__main__"):
                found.append(name)
    return found + [name for name in NEEDS if "." not in name]


def extras_of(module: str) -> str | None:
    return next((extras for prefix, extras in NEEDS.items() if f"{module}.".startswith(f"{prefix}.")), "")


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=REPO, capture_output=True, text=True)


@pytest.mark.parametrize("extras", ["", *dict.fromkeys(filter(None, NEEDS.values()))])
def test_what_an_extra_is_for_imports_with_it_alone(extras: str) -> None:
    of = {name: extras_of(name) for name in modules()}
    chosen = [name for name, need in of.items() if need == extras]
    assert chosen
    done = python("tests/install/only.py", extras, *chosen)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {}


def test_the_gate_of_these_tests_refuses_what_an_extra_does_not_bring() -> None:
    done = python("tests/install/only.py", "", "torch", "pandas", "opentelemetry.sdk.trace", "opentelemetry.trace")
    assert set(json.loads(done.stdout)) == {"torch", "pandas", "opentelemetry.sdk.trace"}


def test_a_missing_module_leads_to_the_extra_that_declares_its_package() -> None:
    extras = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    packages = {"google.protobuf": "protobuf", "opentelemetry.sdk": "opentelemetry-sdk", "pynvml": "nvidia-ml-py"}
    packages |= {"zmq": "pyzmq", "pyroscope": "pyroscope-io"}
    for module, extra in EXTRA_OF.items():
        declared = {Requirement(line).name for line in extras[extra]}
        assert packages.get(module, module) in declared, module
    assert extra_for("torch.nn.functional") == "engine"
    assert extra_for("nothing.of.it") is None


def test_all_brings_every_extra_but_those_for_few() -> None:
    extras = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [line] = extras["all"]
    assert Requirement(line).extras == set(extras) - {"all", "dev", "scale", "compare"}


def test_every_extra_is_named_where_the_installation_is_described() -> None:
    extras = set(tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]) - {"dev"}
    page = (REPO / "docs/install.md").read_text()
    assert set(re.findall(r"^\| `([a-z]+)` \|", page, re.MULTILINE)) == extras


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.argv = ['kvscope', 'version']; from observability.cli import root; root(standalone_mode=False)",
        "import observability.cli.serve, observability.cli.replay, observability.cli.doctor, observability.cli.gpu",
        "import exporters.adapters.doctor, observability.signals, observability.catalog",
    ],
    ids=["version", "commands", "doctor"],
)
def test_a_light_start_loads_nothing_heavy(code: str) -> None:
    done = python("-c", f"{code}\nimport sys; print(*sys.modules, file=sys.stderr)")
    assert done.returncode == 0, done.stderr
    assert HEAVY & set(done.stderr.split()) == set()


def test_the_exporter_loads_neither_torch_nor_pandas() -> None:
    done = python("-c", "import exporters.prometheus, exporters.vllm.recorder, sys; print(*sys.modules)")
    assert (HEAVY - {"numpy"}) & set(done.stdout.split()) == set()
