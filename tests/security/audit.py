"""make audit: known vulnerabilities of the locked versions by pip-audit, whose path is given. Fails for those that are known; where the index
cannot be asked it says how much was not audited."""

from __future__ import annotations

import json
import subprocess
import sys


def main(program: str, lock: str = "requirements.lock") -> int:
    argv = [
        program,
        "--disable-pip",
        "--no-deps",
        "--requirement",
        lock,
        "--format",
        "json",
        "--progress-spinner",
        "off",
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)
    try:
        found = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        reason = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        print(f"Nothing was audited: {reason[:200]}")  # noqa: T201
        return 0
    skipped = [each["name"] for each in found if "skip_reason" in each]
    bad = [
        (each["name"], each["version"], vuln["id"], vuln["fix_versions"])
        for each in found
        for vuln in each.get("vulns", ())
    ]
    print(f"{len(found) - len(skipped)} of {len(found)} packages were audited; {len(bad)} known vulnerabilities.")  # noqa: T201
    for name, version, identity, fixed in bad:
        print(f"{name} {version}: {identity}, corrected in {', '.join(fixed) or 'no version yet'}")  # noqa: T201
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
