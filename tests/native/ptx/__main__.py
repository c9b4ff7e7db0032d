"""Translates kernels to C++: ``python -m tests.native.ptx OUT --architecture sm_90a SOURCE.cu FILE.ptx``.

Each source becomes OUT/NAME.cpp. For an example, OUT/linked/gpu/examples/NAME.cu declares the kernels, for
tests that include it. A PTX file is translated directly, and OUT/NAME.h declares its kernels. ``--check``
prints in one line why this machine cannot translate, or nothing if it can.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.native.ptx import nvrtc
from tests.native.ptx.declarations import declarations
from tests.native.ptx.emitter import declare, emit
from tests.native.ptx.module import PtxError
from tests.native.ptx.parser import parse

ROOT = Path(__file__).parents[3]
#: Like kvxfer.gpu.sources, below native; and this folder, for the kernels of tests.
INCLUDE_FOLDERS = ("native/gpu/rtc", "native", "native/include")


def main() -> int:
    """Returns the exit status."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("out", type=Path, nargs="?")
    arguments.add_argument("sources", type=Path, nargs="*")
    arguments.add_argument("--architecture", default="sm_90a")
    arguments.add_argument("--check", action="store_true")
    given = arguments.parse_intermixed_args()
    try:
        if given.check:
            nvrtc.check_is_here()
            return 0
        given.out.mkdir(parents=True, exist_ok=True)
        for source in given.sources:
            translate(source, given.architecture, given.out)
    except (nvrtc.NotHereError, PtxError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def translate(source: Path, architecture: str, out: Path) -> None:
    """Writes OUT/NAME.cpp, and next to it the PTX that its line numbers refer to."""
    if source.suffix == ".ptx":
        file, text = source.name, source.read_text()
    else:
        file = f"{source.stem}.{architecture}.ptx"
        text = nvrtc.ptx(source, architecture, [ROOT / folder for folder in INCLUDE_FOLDERS])
        (out / file).write_text(text)
        if source.parent.name == "examples":
            declared = out / "linked" / "gpu" / "examples" / source.name
            declared.parent.mkdir(parents=True, exist_ok=True)
            declared.write_text(declarations(source.read_text()))
    module = parse(file, text)
    # Tests compare an example's results within a tolerance; our own kernels promise exact bits.
    is_example = source.parent.name == "examples"
    (out / f"{source.stem}.cpp").write_text(emit(module, may_contract=is_example))
    if source.suffix == ".ptx":
        (out / f"{source.stem}.h").write_text(declare(module))


if __name__ == "__main__":
    sys.exit(main())
