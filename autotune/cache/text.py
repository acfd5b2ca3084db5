"""Entries as JSON that people read, edit and compare: one block an entry, one line a field, in one order."""

from __future__ import annotations

import codecs
import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from autotune.cache.entry import Entry, Failure, Provenance
from autotune.problem import ArraySpec, Problem
from autotune.score.protocol import SOURCES

SCHEMA = 1
"""Version of the format. Raise it when files of before cannot be read any more."""

_ARRAY = re.compile(r"(.+)\[([\d,]*)\]", re.ASCII)
_FILE = ("schema", "chip", "entries")
_ENTRY = (
    "problem",
    "kernel",
    "arrays",
    "params",
    "source",
    "status",
    "tiling",
    "time_s",
    "conditions",
    "provenance",
    "failures",
)
_PROVENANCE = tuple(f.name for f in dataclasses.fields(Provenance))
_FAILURE = ("tiling", "reason")


class BadFile(ValueError):
    """A file that does not hold tilings as this release writes them; the message says what is wrong."""


# Writing ------------------------------------------------------------------------------------------


def to_text(chip: str, entries: Iterable[Entry]) -> str:
    """The file of a chip. The same entries, in whatever order, give the same text."""
    blocks = [_block(entry) for entry in sorted(entries, key=_order)]
    inside = "[\n" + ",\n".join(blocks) + "\n  ]" if blocks else "[]"
    return f'{{\n  "schema": {SCHEMA},\n  "chip": {json.dumps(chip)},\n  "entries": {inside}\n}}\n'


def _order(entry: Entry) -> tuple[str, str, int, Any]:
    text, _, source, conditions = entry.identity
    return entry.problem.kernel, text, SOURCES.index(source), conditions


def _block(entry: Entry) -> str:
    failures = [
        "        " + json.dumps({"tiling": failure.tiling, "reason": failure.reason})
        for failure in entry.failures
    ]
    values = {
        "problem": str(entry.problem),
        "kernel": entry.problem.kernel,
        "arrays": {name: None if spec is None else str(spec) for name, spec in entry.problem.arrays},
        "params": dict(entry.problem.params),
        "source": entry.source,
        "status": entry.status,
        "tiling": entry.tiling,
        "time_s": entry.time_s,
        "conditions": entry.conditions,
        "provenance": dataclasses.asdict(entry.provenance),
    }
    lines = [f"      {json.dumps(name)}: {json.dumps(value)}" for name, value in values.items()]
    inside = "[\n" + ",\n".join(failures) + "\n      ]" if failures else "[]"
    lines.append(f'      "failures": {inside}')
    return "    {\n" + ",\n".join(lines) + "\n    }"


# Reading ------------------------------------------------------------------------------------------


def from_text(data: bytes, chip: str | None = None) -> tuple[str, list[Entry]]:
    """The chip and the entries of a file.

    Raises:
        BadFile: it is no JSON, of another version of the format, of another chip than `chip`, or not what
            `to_text` writes in names, types or values.
    """
    try:
        # Some editors put a byte order mark in front.
        content = json.loads(
            data.removeprefix(codecs.BOM_UTF8).decode(),
            object_pairs_hook=_object,
            parse_constant=_no_constant,
        )
        schema = content.get("schema") if isinstance(content, dict) else None
        if type(schema) is not int or schema != SCHEMA:
            raise BadFile(f"expected version {SCHEMA} of the format, got {schema!r}")
        _names("the file", content, _FILE)
        found = content["chip"]
        if not isinstance(found, str) or (chip is not None and found != chip):
            raise BadFile(f"expected tilings for {chip or 'a chip'}, got some for {found!r}")
        if not isinstance(content["entries"], list):
            raise BadFile(f"entries must be a list, got {content['entries']!r}")
        entries = [_entry(found, block) for block in content["entries"]]
    except BadFile:
        raise
    except RecursionError:
        raise BadFile("nested too deeply") from None
    except (ValueError, TypeError, OverflowError) as error:
        raise BadFile(str(error)) from error
    if len({entry.identity for entry in entries}) < len(entries):
        raise BadFile("an entry is there twice")
    return found, entries


def _entry(chip: str, block: Any) -> Entry:
    _names("an entry", block, _ENTRY)
    arrays, params, failures = block["arrays"], block["params"], block["failures"]
    if not (isinstance(arrays, dict) and isinstance(params, dict) and isinstance(failures, list)):
        raise BadFile(f"{block['problem']}: arrays and params must be objects, and failures a list")
    if not isinstance(block["kernel"], str):
        raise BadFile(f"kernel must be a string, got {block['kernel']!r}")
    problem = Problem.of(block["kernel"], {name: _array(text) for name, text in arrays.items()}, params)
    if block["problem"] != str(problem):
        raise BadFile(
            f"problem says {block['problem']!r}, and kernel, arrays and params say {str(problem)!r}"
        )
    _names("provenance", block["provenance"], _PROVENANCE)
    for failure in failures:
        _names("a failure", failure, _FAILURE)
    entry = Entry(
        problem=problem,
        chip=chip,
        source=block["source"],
        tiling=block["tiling"],
        time_s=block["time_s"],
        failures=tuple(Failure(**failure) for failure in failures),
        conditions=block["conditions"],
        provenance=Provenance(**block["provenance"]),
    )
    if block["status"] != entry.status:
        raise BadFile(f"{problem}: the status is {block['status']!r}, and {entry.status} is right")
    return entry


def _array(text: Any) -> ArraySpec | None:
    if text is None:
        return None
    match = _ARRAY.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise BadFile(f"expected an array such as bfloat16[8,128], got {text!r}")
    dtype, sizes = match.groups()
    spec = ArraySpec(tuple(int(size) for size in sizes.split(",")) if sizes else (), dtype)
    if str(spec) != text:
        raise BadFile(f"expected {spec}, got {text!r}")
    return spec


def _names(what: str, value: Any, names: tuple[str, ...]) -> None:
    if not isinstance(value, dict):
        raise BadFile(f"{what} must be an object, got {value!r}")
    if set(value) != set(names):
        raise BadFile(f"{what}: unexpected or missing {', '.join(sorted(set(value) ^ set(names)))}")


def _object(pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
    """Refuses a name that is there twice, of which JSON would take the last."""
    result = dict(pairs)
    if len(result) < len(pairs):
        raise BadFile(f"a name is there twice among {', '.join(name for name, _ in pairs)}")
    return result


def _no_constant(name: str) -> float:
    raise BadFile(f"{name} is no JSON")
