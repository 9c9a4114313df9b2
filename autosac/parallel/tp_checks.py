"""Which modules can have which tensor-parallel styles (`tp_styles`).

Heads, widths and vocabularies must be shared evenly, and a forward must not count on
what its rank does not have: the rest is refused with what to change.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from autosac._compat import TORCH_VERSION
from autosac.errors import ArgumentError, TraceError
from autosac.tracing.failures import FAILS, RUNS_FIRST

Styles = Mapping[str, str]

OF_HEADS = ("colwise_gather_output", "loss_parallel")
_OF_ROWS = ("colwise", *OF_HEADS)
TO_SEQUENCE = {  # the same with a part of the sequence as output
    "rowwise": "rowwise_to_sequence",
    "rowwise_split_input": "rowwise_split_to_sequence",
}
_OF_WHOLE = {  # the same with the whole as input
    "rowwise": "rowwise_split_input",
    "rowwise_to_sequence": "rowwise_split_to_sequence",
}
_OF_COLUMNS = (*TO_SEQUENCE, *TO_SEQUENCE.values())
SHARED_KEYS, ROTARY_SIZE = "mla_kv_a_proj", "qk_rope_head_dim"

# Styles of modules of experts, and of their parameters: the dimension that is divided,
# and whether that packs two, each of which is.
WIDE_EXPERTS, WHOLE_EXPERTS = OF_EXPERTS = ("moe_tp_experts", "ep_dispatch_experts")
_PACKED_SINCE = (2, 14)  # later than 2.10, which cannot gather what is packed
PARAMETER_DIMENSIONS = {
    "colwise": (-2, False),
    "rowwise": (-1, False),
    "packed_colwise": (-2, True),
    "packed_rowwise": (-1, True),
    "grouped_gemm": (0, False),
}

_PACKED = re.compile(
    r"(qkv|c_attn|in_proj|query_key_value|gate_up|kv_proj|wkv|to_kv)", re.IGNORECASE
)
HEAD_COUNTS = frozenset(
    {
        *("num_heads", "n_heads", "n_head", "num_attention_heads", "nhead"),
        *("num_key_value_heads", "n_kv_heads", "num_kv_heads"),
        *("n_local_heads", "n_local_kv_heads", "all_head_size", "inner_dim"),
    }
)
_WIDTHS = frozenset({"embed_dim", "hidden_size", "d_model", "n_embd", "dim"})
_HEAD_SIZES = frozenset(
    {"head_dim", "head_size", "attention_head_size", "key_value_proj_dim", "d_kv"}
)


_WORDS = {  # for PyTorch's styles
    "ColwiseParallel": "'colwise', or 'colwise_gather_output' for whole outputs",
    "RowwiseParallel": "'rowwise', or 'rowwise_to_sequence' for parts of a sequence",
    "SequenceParallel": "'sequence_parallel'",
    "PrepareModuleInput": "'sequence_to_whole', or 'whole_input' where all is whole",
    "PrepareModuleOutput": "'whole_to_sequence' or 'sequence_around'",
}
_NO_WORD = "one of the table in `autosac.parallel.tp_styles`"


def check_known(styles: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse styles that are none.

    Args:
        styles: By FQN or pattern.
        known: Their names.

    Raises:
        ArgumentError: Says what to write.
    """
    for pattern, style in styles.items():
        if isinstance(style, str) and style in known:
            continue
        if isinstance(style, str):
            names = ", ".join(dict.fromkeys(known))
            shown, advice = f"the style {style!r}", f"use one of {names}"
        else:
            kind = style if isinstance(style, type) else type(style)
            shown = f"a {kind.__name__}"
            advice = f"write the word for it, {_WORDS.get(kind.__name__, _NO_WORD)}"
        raise ArgumentError(
            f"`tp_plan` gives {pattern!r} {shown}, which is not known; {advice}."
        )


def head_counts_read(module: nn.Module) -> list[str]:
    """Attributes that count all heads or their widths, read by a module's forward."""
    read = _read(module) & (HEAD_COUNTS | _WIDTHS)
    return sorted(n for n in read if isinstance(getattr(module, n, None), int))


def counts_can_be_local(module: nn.Module) -> bool:
    """Whether a forward that reads how many heads there are also reads their size.

    Then it is right with fewer of them; else it may take the size from their number.
    """
    read = _read(module)
    return not read & _WIDTHS and bool(read & _HEAD_SIZES)


def _read(module: nn.Module) -> frozenset[str]:
    """Names of attributes that a module's forward reads."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return frozenset(code.co_names) if code else frozenset()


def check(model: nn.Module, styles: Styles, degree: int) -> None:
    """Refuse styles that a model cannot have.

    Raises:
        ArgumentError: Names the module, and what to change.
    """
    for fqn, style in styles.items():
        if is_of_parameter(fqn, styles):
            continue
        module = model.get_submodule(fqn)
        around = model.get_submodule(fqn.rpartition(".")[0])
        if style in _OF_ROWS:
            linear = _of_kind(fqn, module, style, nn.Linear)
            _check_divides(fqn, "outputs", linear.out_features, degree)
            if style == "colwise":
                _check_packed(fqn)
                name = fqn.rpartition(".")[0]
                _check_heads(fqn, linear, around, degree)
                _check_counts(name, around, styles.get(name))
                _check_norms(name, around, styles)
        elif style in _OF_COLUMNS:
            linear = _of_kind(fqn, module, style, nn.Linear)
            _check_divides(fqn, "inputs", linear.in_features, degree)
        elif style == "embedding_rowwise":
            table = _of_kind(fqn, module, style, nn.Embedding)
            _check_divides(fqn, "entries", table.num_embeddings, degree)
        elif style == "local_bias":
            table = _of_kind(fqn, module, style, nn.Embedding)
            _check_divides(fqn, "heads", table.embedding_dim, degree)
        elif style == SHARED_KEYS:
            _of_kind(fqn, module, style, nn.Linear)
            _check_rotary(fqn, around)
        elif style in OF_EXPERTS:
            _check_experts(fqn, module, style, parameter_styles(fqn, styles), degree)
        elif style == "local_heads":
            for name in HEAD_COUNTS:
                if isinstance(number := getattr(module, name, None), int):
                    _check_divides(fqn, f"as `{name}`", number, degree)


def _check_rotary(fqn: str, around: nn.Module) -> None:
    if not isinstance(getattr(around, ROTARY_SIZE, None), int):
        raise ArgumentError(
            f"`{fqn}` has the style {SHARED_KEYS!r}, and the module around it does not"
            f" say which of its outputs all heads share: set `{ROTARY_SIZE}` there, or"
            " leave the attention out of `tp_plan`."
        )


def _of_kind(fqn: str, module: Any, style: str, kind: type) -> Any:
    if isinstance(module, kind):
        return module
    raise ArgumentError(
        f"`tp_plan` gives `{fqn}` the style {style!r}, which is for"
        f" torch.nn.{kind.__name__}, and it is a {type(module).__name__}: leave it"
        " out, or write it as that."
    )


def _check_packed(fqn: str) -> None:
    if _PACKED.search(fqn.rpartition(".")[2]):
        raise ArgumentError(
            f"`{fqn}` packs several projections into one, whose outputs cannot be cut"
            " into equal parts: make them modules of their own, give it the style"
            " 'colwise_gather_output' (and what takes its outputs"
            " 'rowwise_split_input'), or leave it out of `tp_plan`."
        )


def _check_divides(fqn: str, what: str, number: int, degree: int) -> None:
    if number % degree:
        padded = -(-number // degree) * degree
        raise ArgumentError(
            f"`{fqn}` has {number} {what}, which tp={degree} does not divide: make"
            f" that {padded}, take another degree, or leave it out of `tp_plan`."
        )


def _check_heads(fqn: str, linear: nn.Linear, around: nn.Module, degree: int) -> None:
    """Refuse to cut through heads."""
    head_dim = getattr(around, "head_dim", None)
    if isinstance(head_dim, int) and head_dim > 0:
        num_heads = linear.out_features // head_dim
        if linear.out_features % head_dim == 0 and num_heads % degree:
            raise ArgumentError(
                f"`{fqn}` has {num_heads} heads of {head_dim}, which tp={degree} does"
                f" not divide: take a degree that divides {num_heads}, or leave the"
                " attention out of `tp_plan`."
            )


def _check_counts(name: str, around: nn.Module, style: str | None) -> None:
    """Refuse a forward that counts all heads, unless what counts them is changed."""
    counts = head_counts_read(around)
    if counts and style != "local_heads":
        raise ArgumentError(
            f"The forward of `{name}` ({type(around).__name__}) reads"
            f" `{counts[0]}`, which counts all heads, and a rank has some of them:"
            " write `-1` for their number in its views, as in"
            " x.view(batch, length, -1, head_dim); or give it the style 'local_heads',"
            " if that attribute is used for nothing else; or leave its projections out"
            " of `tp_plan`."
        )


def _check_norms(name: str, around: nn.Module, styles: Styles) -> None:
    """Refuse norms of heads that would get a part of their gradients on each rank."""
    head_dim = getattr(around, "head_dim", None)
    for child_name, child in around.named_children():
        fqn = f"{name}.{child_name}" if name else child_name
        shapes = {tuple(p.shape) for p in child.parameters(recurse=False)}
        if shapes == {(head_dim,)} and fqn not in styles:
            raise ArgumentError(
                f"`{fqn}` sees some of the heads on each rank, so that its gradients"
                " must be summed over the ranks: give it the style"
                " 'replicated_with_grad_allreduce' in `tp_plan`."
            )


@contextmanager
def divided(styles: Styles, degree: int) -> Iterator[None]:
    """Here runs, as styles divide it, a step that is known to run whole.

    Args:
        styles: FQN of each module that takes part -> its style.
        degree: Over how many ranks.

    Raises:
        ArgumentError: It fails; names the module, and what to change in `tp_plan`.
    """
    try:
        yield
    except TraceError as error:
        text = str(error)
        if degree == 1 or not text.endswith(RUNS_FIRST):  # else it says what to change
            raise
        raise ArgumentError(
            f"The step runs whole, and fails as `tp_plan` divides it among {degree}"
            f" ranks: {text.removeprefix(FAILS).removesuffix(RUNS_FIRST)} In `tp_plan`,"
            f" {_fitting(error.fqn, styles)}."
        ) from error


def _fitting(fqn: str, styles: Styles) -> str:
    """What to change in styles by which a module fails."""
    style = styles.get(fqn)
    if style in _OF_WHOLE:
        return (
            f"`{fqn}` takes a part of its input and is given another one: give the"
            f" module before it 'colwise', or `{fqn}` {_OF_WHOLE[style]!r}"
        )
    if fqn and style is None and not any(n.startswith(f"{fqn}.") for n in styles):
        return (
            f"the input of `{fqn}` is divided, and it has no style: give it 'rowwise',"
            " or the module before it 'colwise_gather_output'"
        )
    return "give what is divided and what reads it styles that fit, or leave both out"


# --- experts ------------------------------------------------------------------


def is_of_parameter(fqn: str, styles: Styles) -> bool:
    """Whether a name that has a style is a parameter's: one of a module of experts."""
    return styles.get(fqn.rpartition(".")[0]) in OF_EXPERTS


def parameter_styles(fqn: str, styles: Styles) -> dict[str, str]:
    """Name of each parameter of a module of experts -> its style."""
    pairs = ((name.rpartition("."), style) for name, style in styles.items())
    return {name: style for (owner, _, name), style in pairs if owner == fqn}


def takes_routes(module: nn.Module) -> bool:
    """Whether a module skips rows that are routed to experts that it does not have.

    Experts of Transformers do (`use_experts_implementation`).
    """
    return hasattr(module, "_is_expert_parallel")


def _check_experts(
    fqn: str, module: nn.Module, style: str, own: Styles, degree: int
) -> None:
    """Refuse experts whose parts would not add up to what they put out."""
    is_whole = style == WHOLE_EXPERTS
    if is_whole and not takes_routes(module):
        raise ArgumentError(
            f"`{fqn}` has the style {style!r}, which is for experts of Transformers"
            " that skip rows of other ranks, and it is a"
            f" {type(module).__name__}: divide its width with {WIDE_EXPERTS!r}, or"
            " leave it out of `tp_plan`."
        )
    if "forward" in vars(module):
        raise ArgumentError(
            f"`{fqn}` has a forward of its own instead of its type's, which cannot be"
            " divided: take the wrapper away, or leave it out of `tp_plan`."
        )
    inside = [n for n, _ in module.named_modules() if n in own]
    inside += [name for name, _ in module.named_parameters() if "." in name]
    if not is_whole and getattr(module, "has_post_expert_norm", False):
        inside.append("post_expert_norm")
    if inside:
        raise ArgumentError(
            f"`{fqn}.{inside[0]}` would see a part of what it sees in one process:"
            f" {style!r} divides only parameters of the experts themselves. Leave them"
            " out of `tp_plan`."
        )
    for name, parameter in module.named_parameters():
        _check_parameter(f"{fqn}.{name}", parameter, own.get(name), degree, is_whole)


def _check_parameter(
    fqn: str, parameter: nn.Parameter, style: str | None, degree: int, is_whole: bool
) -> None:
    names = [n for n in PARAMETER_DIMENSIONS if (n == "grouped_gemm") == is_whole]
    if style not in names:
        raise ArgumentError(
            f"`{fqn}` is a parameter of experts and has "
            + ("no style" if style is None else f"the style {style!r}")
            + f" in `tp_plan`: give it one of {', '.join(map(repr, names))}. What is"
            " added once to the sum, such as a bias of their outputs, is divided only"
            f" with {WHOLE_EXPERTS!r}."
        )
    dimension, is_packed = PARAMETER_DIMENSIONS[style]
    if is_packed and TORCH_VERSION < _PACKED_SINCE:
        raise ArgumentError(
            f"`{fqn}` packs two parameters, parts of which torch"
            f" {'.'.join(map(str, TORCH_VERSION))} cannot gather: share whole experts"
            " with `tp_plan='expert'`, or use torch 2.14."
        )
    if parameter.dim() < -dimension:
        raise ArgumentError(
            f"`{fqn}` is a vector, and {style!r} divides the last dimension but one:"
            " give it 'rowwise' or 'packed_rowwise'."
        )
    number = parameter.shape[dimension] // (2 if is_packed else 1)
    _check_divides(fqn, "experts" if is_whole else "columns each", number, degree)
