"""Licences of what `pip install kvscope[all]` brings: `python -m tests.security.licences` prints them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement

#: SPDX identifiers that may be in an expression. Weak copyleft (MPL-2.0) stays in its own files.
ALLOWED = {
    "0BSD", "Apache-2.0", "BSD", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "CNRI-Python", "HPND", "ISC", "MIT", "MIT-0", "MIT-CMU",
    "MPL-2.0", "PSF-2.0", "Python-2.0", "Unlicense", "Zlib", "LLVM-exception",
}  # fmt: skip
#: How packages write them that do not use SPDX.
_SPELLED = (
    (r"apache", "Apache-2.0"), (r"3-clause bsd|bsd.3|new bsd", "BSD-3-Clause"), (r"\bbsd\b", "BSD"), (r"\bmit\b", "MIT"),
    (r"mozilla|mpl", "MPL-2.0"), (r"python software foundation|psf", "PSF-2.0"), (r"\bisc\b", "ISC"), (r"unlicense", "Unlicense"),
)  # fmt: skip
#: Packages whose metadata say nothing, with what their repositories say.
SAID_ELSEWHERE = {
    "nvidia-ml-py": "BSD-3-Clause", "promql-parser": "MIT", "atheris": "Apache-2.0", "pyroscope-io": "Apache-2.0",
}  # fmt: skip


def runtime(
    name: str = "kvscope", extras: tuple[str, ...] = ("all", "vllm", "scale")
) -> Iterator[metadata.Distribution]:
    """The installed distributions that `name` with `extras` needs, itself left out."""
    seen: set[tuple[str, str]] = set()
    given: set[str] = set()
    queue = [(name, extra) for extra in ("", *extras)]
    while queue:
        package, extra = queue.pop()
        if (package, extra) in seen:
            continue
        seen.add((package, extra))
        try:
            found = metadata.distribution(package)
        except metadata.PackageNotFoundError:  # of another platform
            continue
        for text in found.requires or ():
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate({"extra": extra}):
                queue += [(need.name, part) for part in ("", *need.extras)]
        if package != name and package not in given:
            given.add(package)
            yield found


def licences(of: metadata.Distribution) -> set[str]:
    """SPDX identifiers of a distribution; what is not known is given as it is written, and as "" where nothing is."""
    about = of.metadata
    name = re.sub(r"[-_.]+", "-", about["Name"]).lower()
    if expression := about.get("License-Expression"):
        return set(re.findall(r"[A-Za-z0-9.-]+", expression)) - {"AND", "OR", "WITH"}
    classifiers = [
        text.split("::")[-1].strip() for text in about.get_all("Classifier") or () if text.startswith("License ::")
    ]
    texts = [text for text in classifiers if text not in ("OSI Approved", "DFSG approved")] or [
        (about.get("License") or "").strip().split("\n")[0][:80]
    ]
    if not any(texts):
        return {SAID_ELSEWHERE.get(name, "")}
    return {next((spdx for pattern, spdx in _SPELLED if re.search(pattern, text.lower())), text) for text in texts}


def main() -> None:
    for found in sorted(runtime(), key=lambda d: d.metadata["Name"].lower()):
        print(f"{found.metadata['Name']:40} {found.version:16} {' '.join(sorted(licences(found)))}")  # noqa: T201


if __name__ == "__main__":
    main()
