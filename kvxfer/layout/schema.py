"""Schemas of JSON objects from other processes: bounded, checked, and readable across versions.

What a newer writer and an older reader agree on
-----------------------------------------------
A document holds the version of its writer, all mandatory fields, and those optional fields that differ from
their defaults. ``needs`` lists the fields that a reader must know to read the document correctly; a field of
an inner object is written ``outer.inner``. A reader uses the default of a missing field, ignores an unknown
field, and refuses a document whose ``needs`` list an unknown field. So fields can be added without a new
format: an older reader goes on where that is safe, and otherwise refuses with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, cast

from kvxfer.errors import invalid

#: Default of a mandatory field.
MANDATORY: Final = object()
# Documents list a handful; no writer lists far more.
_MAX_NEEDS: Final = 64
_MAX_NAME: Final = 64
_MAX_VERSION: Final = 1 << 31


class Field(NamedTuple):
    """One field of a `Schema`.

    Attributes
    ----------
    name
        The field's name in the document and in the result of `Schema.decode`.
    read
        Turns the JSON value into the field's, or raises `ValueError` with words that follow
        "field x ".
    default
        Used if the field is missing; `MANDATORY` if it must not be missing.
    needed
        Whether a reader that does not know the field must refuse documents in which it differs from its
        default.
    write
        Turns the field's value into a JSON one.
    """

    name: str
    read: Callable[[Any], Any]
    default: Any = MANDATORY
    needed: bool = False
    write: Callable[[Any], Any] = lambda value: value


class Schema(NamedTuple):
    """The fields of one kind of JSON object.

    Attributes
    ----------
    what
        Noun for error messages.
    key
        Field that holds the writer's version; ``""`` for an object within another document.
    version
        Version of this writer.
    fields
        All fields that this version knows.
    """

    what: str
    key: str
    version: int
    fields: tuple[Field, ...]

    def values_of(self, item: object) -> dict[str, Any]:
        """Returns the JSON values of `item`'s attributes, without the defaults."""
        return {
            field.name: field.write(getattr(item, field.name))
            for field in self.fields
            if field.default is MANDATORY or getattr(item, field.name) != field.default
        }

    def document(self, item: object) -> dict[str, Any]:
        """Returns `item`, whose attributes are the fields, as a JSON object of this version."""
        values = self.values_of(item)
        document: dict[str, Any] = {self.key: self.version, **values}
        if needs := [field.name for field in self.fields if field.needed and field.name in values]:
            document["needs"] = needs
        return document

    def encode(self, item: object) -> bytes:
        """Returns the same as JSON."""
        import json  # loaded with the first region, like the planner

        return json.dumps(self.document(item), separators=(",", ":")).encode()

    def decode(
        self, encoded: bytes, max_nbytes: int, within: Mapping[str, Schema] | None = None
    ) -> dict[str, Any]:
        """Reads a document that `encode` of this or another version wrote.

        Parameters
        ----------
        encoded
            JSON.
        max_nbytes
            Longer documents are refused unread.
        within
            The schema of each field that is an object of its own.

        Returns
        -------
        dict
            A value for every field, defaults included.

        Raises
        ------
        UsageError
            ``invalid-argument``, naming the field: too long, not JSON, or a field that is repeated, missing,
            of the wrong type, or needed but unknown here (then the message names both versions).
        """
        return self.read(decode_object(encoded, max_nbytes, self.what), within)

    def read(self, document: dict[str, Any], within: Mapping[str, Schema] | None = None) -> dict[str, Any]:
        """Reads what `document` returned, with the checks of `decode`."""
        if not isinstance(document, dict):
            raise invalid(f"{self.what} is a {type(document).__name__}, not an object")
        values = dict(document)
        version = values.pop(self.key, None)
        if type(version) is not int or not 1 <= version < _MAX_VERSION:
            said = repr(version)[:32]
            raise invalid(
                f"{self.what} has no version: field {self.key} is {said}, not a number of at least 1"
            )
        needs = self._needs(values.pop("needs", []))
        within = within or {}
        known = {field.name for field in self.fields}
        for name, schema in within.items():
            known |= {f"{name}.{field.name}" for field in schema.fields}
        if strange := [name for name in needs if name not in known]:
            raise invalid(
                f"{self.what} of version {version} needs {_list(strange)}, which this kvxfer (version "
                f"{self.version}) does not know: upgrade kvxfer at this end, or do not use that feature at "
                "the other end"
            )
        for name in needs:
            outer, _, inner = name.partition(".")
            holder = values.get(outer) if inner else values
            if not isinstance(holder, dict) or (inner or outer) not in holder:
                raise invalid(f"{self.what} needs {name}, but has no such field")
        return self._read(values, within, "")

    def _needs(self, value: Any) -> list[str]:
        if (
            not isinstance(value, list)
            or len(value) > _MAX_NEEDS
            or not all(isinstance(name, str) and 0 < len(name) <= _MAX_NAME for name in value)
        ):
            raise invalid(
                f"{self.what} field needs is not a list of at most {_MAX_NEEDS} names of at most {_MAX_NAME} "
                "letters"
            )
        return value

    def _read(self, values: dict[str, Any], within: Mapping[str, Schema], prefix: str) -> dict[str, Any]:
        missing = [
            field.name for field in self.fields if field.default is MANDATORY and field.name not in values
        ]
        if missing:
            unknown = [name for name in values if name not in {field.name for field in self.fields}]
            also = f" (and has unknown {_list(unknown)})" if unknown else ""
            raise invalid(f"{self.what} lacks {_list([prefix + name for name in missing])}{also}")
        found: dict[str, Any] = {}
        for field in self.fields:
            if field.name not in values:
                found[field.name] = field.default
                continue
            try:
                value = field.read(values[field.name])
            except ValueError as error:
                raise invalid(f"{self.what} field {prefix}{field.name} {error}") from None
            if (inner := within.get(field.name)) is not None:
                value = inner._read(value, {}, f"{prefix}{field.name}.")
            found[field.name] = value
        return found


def decode_object(encoded: bytes, max_nbytes: int, what: str) -> dict[str, Any]:
    """Reads one JSON object with distinct keys.

    Raises
    ------
    UsageError
        ``invalid-argument``: longer than `max_nbytes`, not JSON, not an object, or a repeated key.
    """
    import json

    if not isinstance(cast(object, encoded), bytes | bytearray | str):
        raise invalid(f"{what} is read from bytes, not from a {type(encoded).__name__}")
    if len(encoded) > max_nbytes:
        raise invalid(f"{what} of {len(encoded)} bytes is over the bound of {max_nbytes}")

    def distinct(items: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(items)
        if len(values) != len(items):
            raise invalid(f"{what} names a field twice")
        return values

    try:
        values = json.loads(encoded, object_pairs_hook=distinct)
    except (ValueError, RecursionError) as error:  # JSONDecodeError and bad UTF-8 are ValueErrors
        raise invalid(f"{what} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise invalid(f"{what} is a JSON {type(values).__name__}, not an object")
    return values


# ---- readers of single values -------------------------------------------------------------------


def integer(value: Any) -> int:
    """Reads an integer; refuses true and 1.0."""
    if type(value) is not int:
        raise ValueError(f"is a {type(value).__name__}, not an integer")
    return value


def integer_within(least: int, most: int) -> Callable[[Any], int]:
    """Returns a reader of integers from `least` to `most`."""

    def read(value: Any) -> int:
        if not least <= integer(value) <= most:
            raise ValueError(f"is out of range: it must be {least} to {most}")
        return integer(value)

    return read


def text_within(max_nbytes: int) -> Callable[[Any], str]:
    """Returns a reader of strings of 1 to `max_nbytes` bytes of UTF-8."""

    def read(value: Any) -> str:
        try:
            nbytes = len(text(value).encode())
        except UnicodeEncodeError:  # a lone surrogate
            nbytes = 0
        if not 0 < nbytes <= max_nbytes:
            raise ValueError(f"must have 1 to {max_nbytes} bytes of UTF-8")
        return text(value)

    return read


def integers(value: Any) -> tuple[int, ...]:
    """Reads a list of integers."""
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise ValueError("is not a list of integers")
    return tuple(value)


def text(value: Any) -> str:
    """Reads a string."""
    if not isinstance(value, str):
        raise ValueError(f"is a {type(value).__name__}, not a name")
    return value


def hexadecimal(value: Any) -> bytes:
    """Reads a string of hexadecimal digits, two for each byte."""
    try:
        return bytes.fromhex(text(value))
    except ValueError:
        raise ValueError("is not a string of hexadecimal digits") from None


def flag(value: Any) -> bool:
    """Reads true or false; refuses 0 and 1."""
    if not isinstance(value, bool):
        raise ValueError(f"is a {type(value).__name__}, not true or false")
    return value


def mapping(value: Any) -> dict[str, Any]:
    """Reads an object; another schema reads its fields."""
    if not isinstance(value, dict):
        raise ValueError(f"is a {type(value).__name__}, not an object")
    return value


def _list(names: list[str]) -> str:
    # Escaped: a stranger's names may have line feeds, or lone surrogates, which no log can encode.
    return ", ".join(ascii(name)[1:-1] for name in names[:8])[:200]
