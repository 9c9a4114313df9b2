"""Plan files: JSON that a person can read and a machine checks.

Every list has one line per entry. Units that treat equal ops equally share one list of
ops. A line of it, ``"rerun aten.addmm.default"``, says what the rerun of the unit does
with an op; in chains ``"skip/rerun aten.addmm.default"`` also says what happens to it
when the output of its block is made again. `digest` covers all but the summary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from reprlib import repr as shortened
from typing import Any, TypeVar

from autosac.planning.plan_data import PlanData
from autosac.profiles.fingerprints import digest
from autosac.typed_json import built
from autosac.units.policies import DETACHED, RERUN, SAVE, SKIP, VIEW, OpPolicy
from autosac.units.policy_checks import STREAMS, policies_problem

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
_STREAM_FIELDS = (*STREAMS, "num_saved")
_MORE = {"op_sequences": 0, "variants": 1}  # levels of lines inside, besides their own
_HEADROOM: tuple[set[str], ...] = (
    set(),
    {"kept"},
    {"kept", "loss", "handed"},
)  # see `headroom.py`
_UNREAD = ("format", "summary", "digest")  # what `read` does not hand on


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """How a file lays out a plan, or that for some of its batches."""

    units: tuple[dict[str, Any], ...]
    signatures: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Whole(_Part):
    """How a file lays out a plan."""

    op_sequences: tuple[tuple[str, ...], ...]
    variants: tuple[dict[str, Any], ...]
    model: Any


_Layout = TypeVar("_Layout", bound=_Part)


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

    They are still as JSON has them; units have their ops.

    Raises:
        ValueError: It was changed, or is not as `write` lays it out; says which.
    """
    body = {name: value for name, value in whole.items() if name not in _UNREAD}
    try:
        is_whole = whole.get("digest") == digest(body)
    except ValueError:  # `write` writes no numbers that JSON does not have
        is_whole = False
    if not is_whole:
        raise ValueError("was changed or cut since it was saved. Plan again")
    try:
        return _fields(body)
    except ValueError as error:
        raise ValueError(f"is damaged: {error}. Plan again") from error


def _fields(body: dict[str, Any]) -> dict[str, Any]:
    whole, others = _laid_out(_Whole, body)
    sequences = [list(map(_op, lines)) for lines in whole.op_sequences]
    model = {"model": whole.model}
    variants = [
        {**_part(*_laid_out(_Part, one), sequences), **model, "variants": []}
        for one in whole.variants
    ]
    return {**_part(whole, others, sequences), **model, "variants": variants}


def _laid_out(kind: type[_Layout], body: dict[str, Any]) -> tuple[_Layout, Any]:
    """What a file lays out otherwise than a plan has it, and the other fields."""
    own = {one.name for one in fields(kind)} & body.keys()
    others = {name: value for name, value in body.items() if name not in own}
    return built(kind, {name: body[name] for name in own}), others


def _part(
    part: _Part, others: dict[str, Any], sequences: list[list[tuple[str, str, str]]]
) -> dict[str, Any]:
    """Fields of a plan, or of one for some of its batches, without its model."""
    units = []
    for place, unit in enumerate(part.units):
        index = unit.get("ops")
        if type(index) is not int or not 0 <= index < len(sequences):
            raise ValueError(
                f"`units[{place}].ops` must be the place of one of its"
                f" {len(sequences)} `op_sequences`, got {shortened(index)}"
            )
        actions, onward, names = zip(*sequences[index], strict=True)
        ops = {"names": names, "actions": "".join(actions), "onward": "".join(onward)}
        units.append({**{k: v for k, v in unit.items() if k != "ops"}, **ops})
    signatures = [{"leaves": leaves} for leaves in part.signatures]
    return {**others, "signatures": signatures, "op_policies": units}


def _op(line: str) -> tuple[str, str, str]:
    """Action, action on the way onward ('' outside of chains) and name of an op."""
    words, _, name = line.partition(" ")
    action, _, onward = words.partition("/")
    if not name or not {action, onward or action} <= _LETTERS.keys():
        raise ValueError(f"{shortened(line)} does not say what becomes of an op")
    return _LETTERS[action], onward and _LETTERS[onward], name


def problem(plan: PlanData) -> str | None:
    """Why the fields of a plan cannot be true together, in words; None if they can."""
    for one in plan.variants:
        if (wrong := problem(one)) is not None:
            return wrong
    if not plan.signatures:
        return "it is for no batch"
    if (plan.headroom_bytes or {}).keys() not in _HEADROOM:
        return "it does not say all of what its peak leaves"
    if plan.peak_bytes > plan.budget_bytes:
        return (
            f"its peak of {plan.peak_bytes} bytes is above its budget of"
            f" {plan.budget_bytes}"
        )
    return policies_problem(plan.op_policies, plan.policy, plan.model)


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
