"""Imports modules as if only the light package and some extras were installed: python only.py EXTRAS MODULE... -> JSON {module: error}.

What may be imported is the standard library, our own packages and what the metadata of the installed packages names as the closure of
those extras. Of namespaces that several packages share (opentelemetry, google) only the modules of the packages in the closure.
"""

from __future__ import annotations

import importlib
import importlib.abc
import json
import sys
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

OURS = {"observability", "exporters", "dashboards", "alerts"}


def closure(extras: set[str]) -> set[str]:
    """Names of the distributions that `pip install kvscope[extras]` would bring."""
    found: dict[str, set[str]] = {}
    ask = [("kvscope", extras)]
    while ask:
        name, wanted = ask.pop()
        name = canonicalize_name(name)
        if name in found and wanted <= found[name]:
            continue
        found[name] = found.get(name, set()) | wanted
        try:
            requires = distribution(name).requires or []
        except PackageNotFoundError:  # an optional part of a package that is not here cannot be imported either
            continue
        for line in requires:
            requirement = Requirement(line)
            if any(
                requirement.marker is None or requirement.marker.evaluate({"extra": extra})
                for extra in {"", *found[name]}
            ):
                ask.append((requirement.name, set(requirement.extras)))
    return set(found)


class Gate(importlib.abc.MetaPathFinder):
    """Refuses every import of a package outside `distributions`."""

    def __init__(self, distributions: set[str]) -> None:
        owners = {top: {canonicalize_name(d) for d in names} for top, names in packages_distributions().items()}
        self.foreign = {top for top, names in owners.items() if not names & distributions} - OURS
        shared = {top for top, names in owners.items() if names - distributions and names & distributions} - OURS
        self.modules = set()
        for name in distributions:
            for file in distribution(name).files or [] if _here(name) else []:
                if file.parts[0] in shared and file.suffix in (".py", ".so"):
                    parts = file.with_suffix("").parts
                    self.modules |= {".".join(parts[: i + 1]) for i in range(len(parts))}
        self.shared = shared

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        top = name.partition(".")[0]
        if top in self.foreign or (top in self.shared and name.count(".") >= 1 and name not in self.modules):
            raise ModuleNotFoundError(f"No module named {name!r} (outside the extras)", name=name)


def _here(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def main() -> None:
    extras = {name for name in sys.argv[1].split(",") if name}
    sys.meta_path.insert(0, Gate(closure(extras)))
    failed = {}
    for module in sys.argv[2:]:
        try:
            importlib.import_module(module)
        except Exception as error:
            failed[module] = f"{type(error).__name__}: {error}"
    sys.stdout.write(json.dumps(failed))


if __name__ == "__main__":
    main()
