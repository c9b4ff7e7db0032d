"""A wheel's bill of materials in CycloneDX 1.7: its requirements, and what is linked in or grafted.

    python -m tests.release.bill dist/*.whl

writes ``WHEEL.cdx.json`` beside each. nanobind's version is that of the environment in which this runs:
builds and this script use the pins of ``tests/constraints.txt``. Libraries that are opened at run time
(libibverbs, UCX, libfabric, OpenSSL, CUDA) are not part of a wheel.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from email import message_from_bytes
from email.message import Message
from importlib.metadata import PackagePath, distribution
from pathlib import Path
from typing import Final
from zipfile import ZipFile

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.output.json import JsonV1Dot7
from packageurl import PackageURL
from packaging.requirements import Requirement

#: Extras for tests and checkers, which no installation has.
UNSHIPPED: Final = {"dev"}
_EXTRA: Final = re.compile(r"""extra == ["']([\w-]+)["']""")


def bill_of(wheel: Path) -> Bom:
    """Returns the bill; its number comes from the wheel's digest, so the same wheel has the same bill."""
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        told = message_from_bytes(archive.read(next(n for n in names if n.endswith(".dist-info/METADATA"))))
        sboms = [json.loads(archive.read(n)) for n in names if n.endswith("/sboms/auditwheel.cdx.json")]
    ours = Component(
        name=told["Name"],
        version=told["Version"],
        type=ComponentType.LIBRARY,
        bom_ref="wheel",
        description=told["Summary"],
        licenses=[LicenseFactory().make_from_string(told["License-Expression"])],
        purl=PackageURL("pypi", None, told["Name"], told["Version"], {"file_name": wheel.name}),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)],
    )
    asked = list(_asked(told))
    nanobind, robin_map = _linked()
    grafted = [
        Component(name=each["name"], version=each["version"], purl=PackageURL.from_string(each["purl"]))
        for sbom in sboms
        for each in sbom["components"]
        if each["bom-ref"] != sbom["metadata"]["component"]["bom-ref"]
    ]
    made_at = datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH", wheel.stat().st_mtime)), UTC)
    bom = Bom(
        components=[*asked, nanobind, robin_map, *grafted],
        serial_number=uuid.UUID(digest[:32], version=4),
        metadata=BomMetaData(component=ours, timestamp=made_at),
    )
    bom.register_dependency(ours, [*asked, nanobind, *grafted])
    bom.register_dependency(nanobind, [robin_map])
    return bom


def _asked(told: Message) -> Iterator[Component]:
    """Yields the Python packages that an installation adds, with the version ranges of the wheel."""
    ranges: dict[str, set[str]] = {}
    extras: dict[str, set[str]] = {}
    for line in told.get_all("Requires-Dist") or ():
        asked = Requirement(line)
        found = _EXTRA.search(str(asked.marker or ""))
        if asked.name == told["Name"] or (found and found[1] in UNSHIPPED):
            continue
        ranges.setdefault(asked.name, set()).add(str(asked.specifier))
        extras.setdefault(asked.name, set()).add(found[1] if found else "")
    for name, specifiers in ranges.items():
        is_always = "" in extras[name]
        yield Component(
            name=name,
            bom_ref=f"asked:{name}",
            is_external=True,
            scope=ComponentScope.REQUIRED if is_always else ComponentScope.OPTIONAL,
            purl=PackageURL("pypi", None, name),
            properties=[
                *(Property(name="kvxfer:range", value=each) for each in sorted(specifiers)),
                *(Property(name="kvxfer:extra", value=each) for each in sorted(extras[name] - {""})),
            ],
        )


def _linked() -> tuple[Component, Component]:
    """Returns what is compiled into the modules: nanobind, and the robin_map that comes with it."""
    installed = distribution("nanobind")
    header = next(each for each in installed.files or () if each.name == "robin_growth_policy.h")
    nanobind = Component(
        name="nanobind",
        version=installed.version,
        bom_ref="linked:nanobind",
        licenses=[LicenseFactory().make_from_string("BSD-3-Clause")],
        purl=PackageURL("pypi", None, "nanobind", installed.version),
    )
    version = _robin_map_version(header)
    robin_map = Component(
        name="robin-map",
        version=version,
        bom_ref="linked:robin-map",
        licenses=[LicenseFactory().make_from_string("MIT")],
        purl=PackageURL("github", "tessil", "robin-map", f"v{version}"),
    )
    return nanobind, robin_map


def _robin_map_version(header: PackagePath) -> str:
    text = header.read_text()
    parts = (re.findall(rf"define TSL_RH_VERSION_{part} (\d+)", text) for part in ("MAJOR", "MINOR", "PATCH"))
    return ".".join(number for (number,) in parts)


def main(wheels: list[str]) -> None:
    for wheel in map(Path, wheels):
        JsonV1Dot7(bill_of(wheel)).output_to_file(f"{wheel}.cdx.json", allow_overwrite=True, indent=1)


if __name__ == "__main__":
    main(sys.argv[1:])
