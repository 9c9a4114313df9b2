"""Plan files: JSON that a person can read and a machine checks.

Every list has one line per entry. Units that treat equal ops equally share one list of
ops. A line of it, ``"rerun aten.addmm.default"``, says what the rerun of the unit does
with an op; in chains ``"skip/rerun aten.addmm.default"`` also says what happens to it
when the output of its block is made again. `digest` covers all but the summary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from autosac.profiles.fingerprints import digest
from autosac.step.batch_signatures import BatchSignature
from autosac.units.policies import DETACHED, RERUN, SAVE, SKIP, VIEW, OpPolicy

FORMAT = 3
_WORDS = {
    SAVE: "save",
    RERUN: "rerun",
    SKIP: "skip",
    VIEW: "view",
    DETACHED: "once",
}
_LETTERS = {word: letter for letter, word in _WORDS.items()}
# Of an op policy, besides its module and its ops.
_UNIT_FIELDS = (
    "training",
    "call_index",
    "num_calls",
    "chain",
    "position",
    "around",
    "until",
)
# Of a unit that offloads anything.
_FAR_FIELDS = ("far", "far_until", "prefetched", "far_ops")
# Of a model that is streamed.
_STREAMS = ("streamed", "streamed_bytes", "fetched_with", "let_go_with")
_STREAM_FIELDS = (*_STREAMS, "num_saved")
_TUPLES = ("far", "far_ops", *_STREAMS)
_MORE = {"op_sequences": 0, "variants": 1}  # levels of lines inside, besides their own
_UNREAD = ("format", "summary", "digest")  # what `read` does not hand on


def write(record: Mapping[str, Any], *, summary: list[str]) -> str:
    """Text of a plan file.

    Args:
        record: The plan's fields; ``op_policies`` holds `OpPolicy` objects.
        summary: What people should know first, line by line.
    """
    sequences: dict[tuple[str, ...], int] = {}
    body = _written(record, sequences)
    body |= {
        "variants": [_written(one, sequences) for one in record["variants"]],
        "op_sequences": [list(lines) for lines in sequences],
        "model": record["model"],
    }
    body = json.loads(json.dumps(body, allow_nan=False))  # tuples are lists there
    whole = {"format": FORMAT, "summary": summary, "digest": digest(body), **body}
    return _pretty(whole, depth=2) + "\n"


def _written(
    record: Mapping[str, Any], sequences: dict[tuple[str, ...], int]
) -> dict[str, Any]:
    """Fields of a plan, or of one for some of its batches, without what all share."""
    units = []
    for one in record["op_policies"]:
        lines = _lines(one)
        unit = {"fqn": one.fqn, "ops": sequences.setdefault(lines, len(sequences))}
        fields = (*_UNIT_FIELDS, *(_FAR_FIELDS if one.far else ()))
        fields += _STREAM_FIELDS if one.streamed else ()
        unit |= {name: getattr(one, name) for name in fields}
        units.append(unit)
    longer = ("op_policies", "model", "variants")  # what people read last
    return {
        **{name: value for name, value in record.items() if name not in longer},
        "signatures": [one.leaves for one in record["signatures"]],
        "units": units,
    }


def read(whole: dict[str, Any]) -> dict[str, Any]:
    """The plan's fields from the JSON object of a text that `write` made.

    Raises:
        ValueError: It is of another format, or was changed; says which.
    """
    if whole["format"] != FORMAT:
        raise ValueError(
            f"has plan format {whole['format']}; this autosac reads format {FORMAT}."
            " Plan again, or use the autosac it was made with"
        )
    body = {name: value for name, value in whole.items() if name not in _UNREAD}
    if whole.get("digest") != digest(body):
        raise ValueError("was changed or cut since it was saved. Plan again")
    try:
        return _fields(body)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"is damaged: {error!r}. Plan again") from error


def _fields(body: dict[str, Any]) -> dict[str, Any]:
    sequences = [list(map(_op, lines)) for lines in body.pop("op_sequences")]
    model = tuple((fqn, kind, tuple(own)) for fqn, kind, own in body.pop("model"))
    variants = [_part(one, sequences, model) for one in body.pop("variants")]
    whole = _part(body, sequences, model)
    return {**whole, "variants": [{**one, "variants": []} for one in variants]}


def _part(
    body: dict[str, Any], sequences: list[list[tuple[str, str, str]]], model: Any
) -> dict[str, Any]:
    """Fields of a plan, or of one for some of its batches."""
    units = []
    for unit in body.pop("units"):
        actions, onward, names = zip(*sequences[unit.pop("ops")], strict=True)
        for name in _TUPLES:
            unit[name] = tuple(unit.get(name, ()))
        units.append(
            OpPolicy(
                names=names, actions="".join(actions), onward="".join(onward), **unit
            )
        )
    signatures = tuple(
        BatchSignature(tuple((place, kind, tuple(s)) for place, kind, s in leaves))
        for leaves in body.pop("signatures")
    )
    return {
        **body,
        "opening": tuple(body["opening"]),
        "signatures": signatures,
        "model": model,
        "op_policies": tuple(units),
    }


def _op(line: str) -> tuple[str, str, str]:
    """Action, action on the way onward ('' outside of chains) and name of an op."""
    words, name = line.split(" ")
    action, _, onward = words.partition("/")
    return _LETTERS[action], onward and _LETTERS[onward], name


def problem(record: Mapping[str, Any]) -> str | None:
    """Why the fields of a plan cannot be true together, in words; None if they can."""
    for one in record["variants"]:
        if (wrong := problem(one)) is not None:
            return wrong
    if not record["signatures"]:
        return "it is for no batch"
    modules = {fqn for fqn, _, _ in record["model"]}
    units = record["op_policies"]
    if record["peak_bytes"] > record["budget_bytes"]:
        return (
            f"its peak of {record['peak_bytes']} bytes is above its budget of"
            f" {record['budget_bytes']}"
        )
    if any(one.far and not one.far_until for one in units):
        return "a unit of it never lets go of what it offloads"
    if any(one.actions[i : i + 1] != SAVE for one in units for i in one.far_ops):
        return "a unit of it offloads results that it does not save"
    for one in units:
        if len({len(getattr(one, name)) for name in _STREAMS}) > 1:
            return "it does not say of all that it streams when that goes and comes"
        if any(not 0 <= k < len(one.streamed) for k in one.fetched_with):
            return "it fetches something with what it does not stream"
    if {one.label for one in units if not one.streamed} != record["policy"].keys():
        return "its policy and its op policies are for different units"
    ends = {fqn for one in units for fqn in (one.fqn, one.until, one.far_until) if fqn}
    if strange := ends - modules:
        return f"its unit `{min(strange)}` is no module of its model"
    return None


def _lines(one: OpPolicy) -> tuple[str, ...]:
    words = [_WORDS[action] for action in one.actions]
    if one.onward:
        both = zip(words, one.onward, strict=True)
        words = [f"{word}/{_WORDS[onward]}" for word, onward in both]
    return tuple(map(" ".join, zip(words, one.names, strict=True)))


def _pretty(value: object, depth: int, indent: str = "") -> str:
    """JSON with a line per entry down to a depth, and further lists on one line."""
    if depth == 0 or not isinstance(value, (dict, list)) or not value:
        return json.dumps(value)
    inner = indent + " "
    if isinstance(value, dict):
        items = [
            f"{json.dumps(key)}: {_pretty(item, depth + _MORE.get(key, -1), inner)}"
            for key, item in value.items()
        ]
    else:
        items = [_pretty(item, depth - 1, inner) for item in value]
    left, right = "{}" if isinstance(value, dict) else "[]"
    return f"{left}\n{inner}" + f",\n{inner}".join(items) + f"\n{indent}{right}"
