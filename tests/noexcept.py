"""Finds functions that must not throw and can run out of memory, in the machine code of a shared library.

A function's table (.gcc_except_table) lists the calls that may throw. A call that it leaves out ends the
process if it throws: g++ leaves out the calls of noexcept functions, also where those were inlined. So a way
from a left-out call to operator new that passes no handler of std::bad_alloc is a finding. So is a way into
handlers of other exceptions alone, in a function that never passes an exception on. Calls by pointer (virtual
functions, std::function, other libraries) are not followed. What the C++ library's strings allocate is known
by name.
"""

from __future__ import annotations

import re
import struct
import subprocess
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ALLOCATES = re.compile(
    r"_Zn[wa]m(St11align_val_t)?$|_ZSt17__throw_bad_allocv$|_ZNSt7__cxx1112basic_string\w*?E"
    r"(9_M_append|9_M_create|9_M_assign|9_M_mutate|10_M_replace|14_M_replace_aux|7reserve|6append|9push_back|6assign"
    r"|7replace|6resize|12_M_construct|C[12]E(PK|RKS|mc)|aSE(PK|RK)|pLE)"
)
_CATCHES = re.compile(r"9bad_alloc|9exception$")


class Site(NamedTuple):
    """Calls between two addresses: whether a handler takes bad_alloc, or whether there is any."""

    begin: int
    end: int
    catches: bool
    lands: bool


class Function(NamedTuple):
    """A function, or the part of one that is laid apart. ``sites`` is None if nothing stops an exception."""

    begin: int
    end: int
    sites: list[Site] | None

    def fate(self, call: int) -> str:
        """What an exception of this call does: it passes on, lands here, is caught, or ends the process."""
        if self.sites is None:
            return "passes"
        found = next((site for site in self.sites if site.begin <= call < site.end), None)
        if found is None:
            return "ends"
        return "caught" if found.catches else "lands" if found.lands else "passes"


class _Image:
    """The sections of a 64-bit ELF file."""

    def __init__(self, path: Path) -> None:
        self.data = path.read_bytes()
        (table,) = struct.unpack_from("<Q", self.data, 40)
        count, names = struct.unpack_from("<HH", self.data, 60)
        rows = [struct.unpack_from("<IIQQQQ", self.data, table + 64 * i) for i in range(count)]
        self.sections = {self._text(rows[names][4] + row[0]): row[3:6] for row in rows}
        said = subprocess.run(["nm", str(path)], capture_output=True, text=True, check=True).stdout
        self.names: dict[int, str] = {}
        for address, name in re.findall(r"^([0-9a-f]{16}) \w (\S+)$", said, re.MULTILINE):
            self.names.setdefault(int(address, 16), name)

    def _text(self, at: int) -> str:
        return self.data[at : self.data.index(b"\0", at)].decode()

    def functions(self) -> list[Function]:
        """By address, from .eh_frame."""
        address, at, nbytes = self.sections[".eh_frame"]
        begin, end, kinds, found = at, at + nbytes, dict[int, tuple[int, int]](), []
        while at < end:
            (length,) = struct.unpack_from("<I", self.data, at)
            body = at + 4
            if length:
                (back,) = struct.unpack_from("<I", self.data, body)
                if back == 0:
                    kinds[at] = self._encodings(body + 5)
                else:
                    pointers, tables = kinds[body - back]
                    first, after = self._value(pointers, body + 4)
                    first += body + 4 - begin + address
                    size, after = self._value(pointers & 15, after)
                    _, after = self._uleb(after)
                    table = self._value(tables, after)[0] if tables != 0xFF else 0
                    sites = list(self._sites(first, table + after - begin + address)) if table else None
                    found.append(Function(first, first + size, sites))
            at = body + length
        return sorted(found)

    def _encodings(self, at: int) -> tuple[int, int]:
        letters = self._text(at)
        at = self.data.index(b"\0", at) + 1
        for _ in range(4 if letters.startswith("z") else 3):  # alignments, a register, a length
            _, at = self._uleb(at)
        pointers = tables = 0xFF
        for letter in letters[1:]:
            kind, at = self.data[at], at + 1
            if letter == "R":
                pointers = kind
            elif letter == "L":
                tables = kind
            elif letter == "P":
                _, at = self._value(kind, at)
        return pointers, tables

    def _sites(self, function: int, table: int) -> Iterator[Site]:
        address, offset, _ = self.sections[".gcc_except_table"]
        at = table - address + offset
        pad, at = self.data[at], at + 1
        if pad != 0xFF:
            _, at = self._value(pad, at)
        kind, at, types = self.data[at], at + 1, 0
        if kind != 0xFF:
            distance, at = self._uleb(at)
            types = at + distance
        form, at = self.data[at], at + 1
        nbytes, at = self._uleb(at)
        actions = at + nbytes
        while at < actions:
            first, at = self._value(form, at)
            length, at = self._value(form, at)
            landing, at = self._value(form, at)
            action, at = self._uleb(at)
            catches = bool(landing) and self._catches(actions, action, kind, types)
            yield Site(function + first, function + first + length, catches, bool(landing))

    def _catches(self, actions: int, action: int, kind: int, types: int) -> bool:
        address, offset, _ = self.sections[".gcc_except_table"]
        while action:
            number, at = self._sleb(actions + action - 1)
            if number > 0:
                entry = types - number * (4 if kind & 15 in (3, 11) else 8)
                to, _ = self._value(kind, entry)
                if not to or _CATCHES.search(self.names.get(to + entry - offset + address, "")):
                    return True
            step, _ = self._sleb(at)
            action = at + step - actions + 1 if step else 0
        return False

    def _value(self, encoding: int, at: int) -> tuple[int, int]:
        if encoding & 15 == 1:
            return self._uleb(at)
        form = {3: "<I", 11: "<i"}.get(encoding & 15, "<q")
        return struct.unpack_from(form, self.data, at)[0], at + struct.calcsize(form)

    def _uleb(self, at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            byte, at = self.data[at], at + 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value, at

    def _sleb(self, at: int) -> tuple[int, int]:
        value, after = self._uleb(at)
        bits = 7 * (after - at)
        return (value - (1 << bits) if value >> (bits - 1) else value), after


def findings(library: Path) -> dict[str, set[str]]:
    """The functions that end the process without memory, and what they call."""
    image = _Image(library)
    functions = image.functions()
    begins = [function.begin for function in functions]

    def index_of(address: int) -> int | None:
        found = bisect_right(begins, address) - 1
        return found if found >= 0 and address < functions[found].end else None

    by_name = {name: found for at, name in image.names.items() if (found := index_of(at)) is not None}
    calls: defaultdict[int | str, list[tuple[int, str]]] = defaultdict(list)  # by what is called
    called_by: defaultdict[int, set[str]] = defaultdict(set)  # functions outside
    code = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(library)], capture_output=True, text=True, check=True
    ).stdout
    pattern = r"^\s*([0-9a-f]+):\s+(?:bnd )?(call|j\w+)\s+([0-9a-f]+) <([^>+]+)"
    for at, kind, to, name in re.findall(pattern, code, re.MULTILINE):
        caller, outside = index_of(int(at, 16)), name.removesuffix("@plt")
        called = by_name.get(outside) if outside != name else index_of(int(to, 16))
        if caller is None or (kind != "call" and called == caller):
            continue
        fate = functions[caller].fate(int(at, 16)) if kind == "call" else "passes"
        calls[outside if called is None else called].append((caller, fate))
        called_by[caller].add(outside)

    def dies_after_landing(caller: int) -> bool:
        cold = by_name.get(f"{image.names.get(begins[caller])}.cold", caller)
        outside = called_by[caller] | called_by[cold]
        return "_ZSt9terminatev" in outside and "_Unwind_Resume" not in outside

    throwing: list[int | str] = [name for name in calls if isinstance(name, str) and ALLOCATES.match(name)]
    seen, dying = set(throwing), set[tuple[int, int | str]]()
    while throwing:
        thrower = throwing.pop()
        for caller, fate in calls[thrower]:
            if fate == "ends" or (fate == "lands" and dies_after_landing(caller)):
                dying.add((caller, thrower))
            elif fate != "caught" and caller not in seen:
                seen.add(caller)
                throwing.append(caller)

    def name_of(each: int | str) -> str:
        return each if isinstance(each, str) else image.names.get(begins[each], hex(begins[each]))

    pairs = [(name_of(caller), name_of(called)) for caller, called in dying]
    text = "\n".join(name for pair in pairs for name in pair)
    words = subprocess.run(
        ["c++filt"], input=text, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    named: defaultdict[str, set[str]] = defaultdict(set)
    for caller_name, called_name in zip(words[::2], words[1::2], strict=True):
        named[caller_name].add(called_name)
    return named
