"""The package as others get it: a wheel from the source distribution, in a clean environment with only what the light package asks for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from observability.cli import boards, rules
from tests.conftest import REPO, require

CODE = ("observability", "exporters", "dashboards", "alerts")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(source distribution, wheel built from it)."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPO, capture_output=True, text=True).stdout
    require(bool(listed), "not a git checkout")
    for name in filter(None, listed.split("\0")):
        if name.startswith(CODE) or "/" not in name:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).symlink_to(REPO / name)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(tree)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [source], [wheel] = out.glob("*.tar.gz"), out.glob("*.whl")
    return source, wheel


@pytest.fixture(scope="module")
def clean(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the programs of an environment that holds the wheel and the light package's own dependencies."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "--disable-pip-version-check"]
    lock = ["--constraint", str(REPO / "requirements.lock")]
    done = subprocess.run([*pip, "install", "--quiet", *lock, str(built[1])], capture_output=True, text=True)
    require("No matching distribution" not in done.stderr, f"no package index is reached: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr
    return folder / "bin"


def run(clean: Path, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run([str(clean / "kvscope"), *words], cwd=folder, env=environment, capture_output=True, text=True)


def test_the_wheel_holds_all_code_and_data_and_nothing_else(built: tuple[Path, Path]) -> None:
    listed = subprocess.run(["git", "ls-files", *CODE], cwd=REPO, capture_output=True, text=True).stdout.split()
    left_out = re.compile(
        r"^(alerts/tests|(alerts|dashboards)/generated)/"
    )  # the first for tests, the second is made by commands
    wanted = {name for name in listed if not left_out.match(name)}
    held = {name for name in zipfile.ZipFile(built[1]).namelist() if ".dist-info/" not in name}
    assert held == wanted


def test_the_source_distribution_has_licence_and_readme(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "observability/app/style.css"} <= names


def test_the_light_package_makes_the_boards_and_rules_of_the_repository(clean: Path, tmp_path: Path) -> None:
    for what, files in (("boards", boards.files()), ("rules", rules.files())):
        done = run(clean, what, "write", what, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        for name, text in files.items():
            assert (tmp_path / what / name).read_text() == text


def test_the_light_package_has_doctor_and_scrape_jobs_and_says_what_else_needs(clean: Path, tmp_path: Path) -> None:
    told = json.loads(run(clean, "version", "--json", folder=tmp_path).stdout)
    assert not any(told["extras"].values())
    jobs = run(clean, "scrape-config", "--engine", "vllm", "--target", "127.0.0.1:8000", folder=tmp_path)
    assert yaml.safe_load(jobs.stdout)["scrape_configs"]
    doctor = run(clean, "doctor", "http://127.0.0.1:9/metrics", folder=tmp_path)
    assert doctor.returncode == 2  # cannot be read
    assert "does not answer" in doctor.stderr + doctor.stdout
    refused = run(clean, "serve", "tiny", "--port", "0", folder=tmp_path)
    assert refused.returncode == 2
    assert 'pip install "kvscope[engine]"' in refused.stderr
