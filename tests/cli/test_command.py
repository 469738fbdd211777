"""The command as such: its version, completion in a real shell, and a word on what to install where a package is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from typer.testing import CliRunner

from observability.cli import root
from tests.conftest import REPO


def test_version_as_json_names_what_is_installed() -> None:
    told = json.loads(CliRunner().invoke(root, ["version", "--json"]).stdout)
    assert told["kvscope"] == version("kvscope")
    assert told["python"] == ".".join(map(str, sys.version_info[:3]))
    assert told["extras"]["engine"] is True
    assert told["packages"]["torch"] == version("torch")
    assert "vllm" not in told["packages"]  # what is not here is absent
    assert CliRunner().invoke(root, ["--version"]).stdout == f"kvscope {version('kvscope')}\n"


def test_a_version_in_the_environment_is_no_option() -> None:
    assert "extras" in CliRunner().invoke(root, ["version"], env={"KVSCOPE_VERSION": "0.1.0"}).stdout


def test_bash_completes_commands_and_options(tmp_path: Path, program: Callable[[str], str]) -> None:
    kvscope = tmp_path / "kvscope"
    kvscope.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m observability.cli "$@"\n')
    kvscope.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(REPO)}
    asks = """
    eval "$(_KVSCOPE_COMPLETE=source_bash kvscope)"
    complete -p kvscope
    ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _kvscope_completion kvscope; echo "${COMPREPLY[@]}"; }
    ask kvscope ser
    ask kvscope serve --kv-d
    """
    done = subprocess.run(
        [program("bash"), "--norc", "-c", asks], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    _, *found = done.stdout.splitlines()
    assert found == ["serve", "--kv-dtype"]


def test_a_missing_package_says_which_extra_brings_it() -> None:
    hidden = "import sys; sys.modules['torch'] = None; from observability.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", hidden, "serve", "tiny", "--port", "0"], cwd=REPO, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert 'pip install "kvscope[engine]"' in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
