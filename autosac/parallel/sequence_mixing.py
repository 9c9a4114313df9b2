"""Whether a model does all but attention token by token: the whole step beside a part.

The ops of both steps are the same but for those around attention. Beside the whole
sequence an op of a part that is 1 / degree as long makes as much or 1 / degree of it;
what else it makes, or from what, tells that tokens meet where ranks do not:

    another share                       scores of attention that is no fused kernel
    all of it from parts                a token is picked, or all are added up
    a part from no part                 positions are counted or looked up by place
    ops that mix neighbours             convolutions, sums up to each token

Only floating-point results count, and losses, which are one number, do not. Ops that do
not correspond are passed over: this finds mistakes, and is no proof that there is none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import prod

from autosac.errors import UnsupportedError
from autosac.step.tape import Op, Tape

_MIXING = (
    *("convolution", "cumsum", "cumprod", "logcumsumexp", "flip", "roll", "sort"),
    *("batch_norm", "group_norm", "_fft_", "lstm", "gru", "rnn"),
)
_CONSTANT = ("zeros", "ones", "full", "empty", "fill", "rand", "bernoulli")
_COUNTING = ("aten.arange", "aten.linspace")
_ATTENTION = "_scaled_dot_product"


def check_tokens_apart(whole: Tape, part: Tape, degree: int) -> None:
    """Refuse a model whose tokens meet elsewhere than in attention.

    Args:
        whole: The step of the whole sequence.
        part: That of a rank.
        degree: How many ranks share the sequence.

    Raises:
        UnsupportedError: Names the module, and the op.
    """
    is_part = {
        i: False
        for i, storage in enumerate(part.storages)
        if storage.category in ("parameter", "buffer")
    }
    for fqn, long, short in op_pairs(whole, part):
        why = _mistake(long, short, degree, is_part)
        if why:
            raise UnsupportedError(
                f"{f'`{fqn}`' if fqn else 'The model'} {why} ({short.name}), and under"
                " context parallelism a rank has a part of the sequence, which only"
                " `scaled_dot_product_attention` sees as a whole: plan without 'cp'."
            )


def _mistake(long: Op, short: Op, degree: int, is_part: dict[int, bool]) -> str:
    """What is wrong with an op of a part, '' if nothing is; notes what it makes.

    Args:
        long: The op of the whole sequence.
        short: That of the part.
        degree: How many parts there are.
        is_part: Storage of the part's step -> it is one, as far as is known.
    """
    sizes = (sum(map(prod, long.shapes)), sum(map(prod, short.shapes)))
    is_cut = sizes[0] == degree * sizes[1]
    known = [is_part[storage] for storage in short.reads if storage in is_part]
    is_all_known = len(known) == len(short.reads)
    for storage in short.creates:
        is_part[storage] = is_cut
    if is_cut and short.name.startswith(_COUNTING):
        return "counts tokens: let it take `position_ids`"
    if not short.dtype or max(sizes) <= 1:
        return ""
    if sizes[0] != sizes[1] and not is_cut:
        return "compares tokens with each other"
    if not is_cut:
        return "picks tokens or adds them up" if any(known) else ""
    if any(name in short.name for name in _MIXING):
        return "mixes tokens"
    is_constant = any(name in short.name for name in _CONSTANT)
    if is_all_known and not any(known) and not is_constant:
        return "looks up what belongs to places: let it take `position_ids`"
    return ""


def op_pairs(whole: Tape, part: Tape) -> Iterator[tuple[str, Op, Op]]:
    """Ops of forward that correspond, in order, with the FQN of their module."""
    long, short = _by_module(whole), _by_module(part)
    partner: dict[int, tuple[Op, Op]] = {}
    for fqn, own in short.items():
        partner |= {id(b): (a, b) for a, b in _aligned(long.get(fqn, []), own)}
    for op in part.ops:
        if id(op) in partner:
            yield part.modules[op.module].fqn, *partner[id(op)]


def _by_module(tape: Tape) -> dict[str, list[Op]]:
    """FQN of each module -> its own ops of forward."""
    ops = defaultdict(list)
    for op in tape.ops:
        if op.phase == "forward":
            ops[tape.modules[op.module].fqn].append(op)
    return ops


def _aligned(long: list[Op], short: list[Op]) -> list[tuple[Op, Op]]:
    """Ops of a module that correspond: equal ones from both of its ends on.

    Around attention, and where positions are made that a rank is given, are others.
    """
    places = [i for i, op in enumerate(long) if _ATTENTION in op.name]
    first, last = (places[0], places[-1]) if places else (len(long), -1)
    before = _same(long[:first], short)
    rest = max(last + 1, len(before))
    after = _same(long[rest:][::-1], short[len(before) :][::-1])
    return before + after[::-1]


def _same(long: list[Op], short: list[Op]) -> list[tuple[Op, Op]]:
    """Pairs from the beginning on, as long as they are the same ops."""
    pairs = []
    for a, b in zip(long, short, strict=False):
        if a.name != b.name:
            break
        pairs.append((a, b))
    return pairs
