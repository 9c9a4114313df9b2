"""Tensor-parallel styles of a model: those it brings along, or known from its names.

A model of Transformers that has a plan (`model.tp_plan`) says its styles itself. In any
other one, linear layers are told by the names that people give them: projections of an
attention and of an MLP that lie in one module, an embedding of tokens and the head over
the same vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from autosac.errors import ArgumentError, UnsupportedError
from autosac.parallel.tp_checks import (
    OF_EXPERTS,
    OF_HEADS,
    PARAMETER_DIMENSIONS,
    SHARED_KEYS,
    TO_SEQUENCE,
    WHOLE_EXPERTS,
    WIDE_EXPERTS,
    Styles,
    counts_can_be_local,
    head_counts_read,
    is_of_parameter,
    takes_routes,
)
from autosac.parallel.tp_styles import STYLES, expanded

# Names of linear layers in one module: those that are cut by rows, and by columns.
_PAIRS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("q_proj", "k_proj", "v_proj"), ("o_proj", "out_proj")),
    (("wq", "wk", "wv"), ("wo",)),
    (("query", "key", "value"), ("out", "proj")),
    (("q", "k", "v"), ("o", "out", "proj")),
    (("gate_proj", "up_proj"), ("down_proj",)),
    (("up_proj",), ("down_proj",)),
    (("w1", "w3"), ("w2",)),
    (("wi_0", "wi_1"), ("wo",)),
    (("wi",), ("wo",)),
    (("fc1",), ("fc2",)),
    (("c_fc",), ("c_proj",)),
    (("linear1",), ("linear2",)),
    (("lin1",), ("lin2",)),
    (("up",), ("down",)),
    (("fc_in",), ("fc_out",)),
    (("self.query", "self.key", "self.value"), ("output.dense",)),
    (("intermediate.dense",), ("output.dense",)),
)
_BIAS = "relative_attention_bias"  # of T5: a value for each head
_EMBEDDINGS = ("embed_tokens", "tok_embeddings", "wte", "token", "tokens", "shared")
_HEADS = ("lm_head", "output", "head")
# What may lie between two linear layers of a sequence that are cut.
_ELEMENTWISE = (nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Dropout, nn.Identity)


def find_styles(
    model: nn.Module, *, sequence: bool = False, whole_experts: bool = False
) -> dict[str, str]:
    """FQN -> style of every module that takes part in tensor parallelism.

    Args:
        model: Any model; it is not changed.
        sequence: Between the blocks each rank has a part of the sequence.
        whole_experts: Ranks have whole experts of mixtures instead of parts of each.

    Raises:
        ArgumentError: Nothing in it is known; or sequences cannot be cut in it; or it
            has no experts that skip rows of others.
        UnsupportedError: It brings a style along that is not executed here.
    """
    styles = {**_experts(model), **(_brought(model) or _by_name(model))}
    if whole_experts:
        styles = _with_whole_experts(model, styles)
    if not styles:
        raise ArgumentError(
            f"No module of {type(model).__name__} is known to be divisible for tensor"
            " parallelism; pass `tp_plan`, a dict of names or patterns to styles such"
            " as {'blocks.*.mlp.up': 'colwise', 'blocks.*.mlp.down': 'rowwise'}."
        )
    styles = {**styles, **_ties(model, styles), **_around(model, styles)}
    if sequence:
        styles = _by_sequence(model, styles)
    return expanded(styles, model)


def with_divided_loss(styles: Styles) -> dict[str, str]:
    """The same styles with logits that stay divided over the vocabulary.

    Args:
        styles: Of a model, in its order: the last module whose output is gathered is
            its head.

    Raises:
        ArgumentError: There is no such module.
    """
    heads = [fqn for fqn, style in styles.items() if style in OF_HEADS]
    if not heads:
        raise ArgumentError(
            "`loss_parallel` is for a head that is divided over the vocabulary, and"
            " none is known in this model: leave it out, or pass `tp_plan` as a dict"
            " in which the head has the style 'loss_parallel'."
        )
    return {**styles, heads[-1]: "loss_parallel"}


def _brought(model: nn.Module) -> dict[str, str]:
    """The plan that a model of Transformers has of itself."""
    plan: Any = getattr(model, "tp_plan", None)
    if not isinstance(plan, dict):
        return {}
    modules = dict(model.named_modules())
    names = list(modules)
    for pattern, style in plan.items():
        if style in OF_EXPERTS:
            names += (
                f"{fqn}.{name}"
                for fqn, module in modules.items()
                if _is_named(fqn, pattern)
                for name, _ in module.named_parameters()
            )
    styles = {}
    for pattern, style in plan.items():
        if not any(_is_named(name, pattern) for name in names):
            continue
        if style not in STYLES and style not in PARAMETER_DIMENSIONS:
            raise UnsupportedError(
                f"The model's own `tp_plan` gives {pattern!r} the style {style!r},"
                " which is not executed here; pass `tp_plan` with styles of"
                f" {', '.join(STYLES)}."
            )
        styles[pattern] = style
    return styles


def _is_named(fqn: str, pattern: str) -> bool:
    parts, wanted = fqn.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(
        one in ("*", part) for one, part in zip(wanted, parts, strict=True)
    )


def _by_name(model: nn.Module) -> dict[str, str]:
    styles: dict[str, str] = {}
    for fqn, module in model.named_modules():
        prefix = f"{fqn}." if fqn else ""
        for rows, columns in _PAIRS:
            column = [name for name in columns if _fits(module, rows, name)]
            if column and not any(prefix + name in styles for name in rows):
                styles.update(dict.fromkeys((prefix + n for n in rows), "colwise"))
                styles[prefix + column[0]] = "rowwise"
        if isinstance(module, nn.Sequential):
            styles.update(_in_sequence(prefix, module))
        bias = getattr(module, _BIAS, None)
        if f"{prefix}q" in styles and isinstance(bias, nn.Embedding):
            styles[prefix + _BIAS] = "local_bias"
    return {**styles, **_vocabulary(model)} if styles else {}


def _fits(module: nn.Module, rows: tuple[str, ...], column: str) -> bool:
    """Whether what some linear layers put out is what another one takes, as it is.

    In an attention nothing else may have parameters: norms of heads would get a part of
    their gradients on each rank.
    """
    first, last = _linear(module, rows[0]), _linear(module, column)
    if last is None or first is None or not all(_linear(module, n) for n in rows):
        return False
    if first.out_features != last.in_features:
        return False
    if len(rows) < 3:
        return True
    around = rows[0].rpartition(".")[0]
    attention = module.get_submodule(around)
    own = {name.rpartition(".")[2] for name in (*rows, column)} | {_BIAS}
    named = {name for name, _ in _trained(attention)}
    return named <= own and not any(True for _ in attention.parameters(recurse=False))


def _linear(module: Any, path: str) -> nn.Linear | None:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module if isinstance(module, nn.Linear) else None


def _in_sequence(prefix: str, sequence: nn.Sequential) -> dict[str, str]:
    """Two linear layers of a sequence with nothing but single elements between."""
    named = list(sequence.named_children())
    linear = [i for i, (_, child) in enumerate(named) if isinstance(child, nn.Linear)]
    if len(linear) != 2:
        return {}
    first, last = linear
    between = [child for _, child in named[first + 1 : last]]
    if not between or not all(isinstance(child, _ELEMENTWISE) for child in between):
        return {}
    return {prefix + named[first][0]: "colwise", prefix + named[last][0]: "rowwise"}


def _vocabulary(model: nn.Module) -> dict[str, str]:
    """The embedding of tokens, and the head over the same vocabulary."""
    styles: dict[str, str] = {}
    sizes: set[int] = set()
    for fqn, module in model.named_modules():
        if fqn.rpartition(".")[2] in _EMBEDDINGS and isinstance(module, nn.Embedding):
            styles[fqn] = "embedding_rowwise"
            sizes.add(module.num_embeddings)
    for fqn, module in model.named_modules():
        is_head = fqn.rpartition(".")[2] in _HEADS and isinstance(module, nn.Linear)
        if is_head and module.out_features in sizes:
            styles[fqn] = "colwise_gather_output"
    return styles


def _ties(model: nn.Module, styles: Styles) -> dict[str, str]:
    """Embeddings that share a parameter with a head that is cut."""
    cut = {
        id(model.get_submodule(fqn).weight)
        for fqn, style in expanded(styles, model).items()
        if style in OF_HEADS
    }
    return {
        fqn: "embedding_rowwise"
        for fqn, module in model.named_modules()
        if isinstance(module, nn.Embedding) and id(module.weight) in cut
    }


def _around(model: nn.Module, styles: Styles) -> dict[str, str]:
    """Modules that count heads, or hand one argument to several that are cut by rows.

    The latter only if nothing else in them has parameters: that would meet a
    distributed tensor. A module has one style: counted heads go first.
    """
    own = expanded(styles, model)
    found = {}
    for fqn, module in model.named_modules():
        names = [f"{fqn}.{name}" if fqn else name for name, _ in _trained(module)]
        cut = [name for name in names if own.get(name) == "colwise"]
        if cut and head_counts_read(module) and counts_can_be_local(module):
            found[fqn] = "local_heads"
        elif len(cut) > 1 and all(name in own for name in names):
            found[fqn] = "whole_input"
    return found


def _trained(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Children of a module that have parameters."""
    for name, child in module.named_children():
        if any(True for _ in child.parameters()):
            yield name, child


# --- experts ------------------------------------------------------------------


def _experts(model: nn.Module) -> dict[str, str]:
    """Experts of Transformers, by what says how their parameters are laid out."""
    styles: dict[str, str] = {}
    for fqn, module in model.named_modules():
        own = _of_experts(module) if takes_routes(module) else {}
        if own and own.keys() == {name for name, _ in module.named_parameters()}:
            styles[fqn] = WIDE_EXPERTS
            styles |= {f"{fqn}.{name}": style for name, style in own.items()}
    return styles


def _of_experts(module: Any) -> dict[str, str]:
    """Name of each parameter that experts may have -> its style."""
    up, down = ("colwise", "rowwise")[:: -1 if module.is_transposed else 1]
    if not module.has_gate:
        return {"up_proj": up, "down_proj": down}
    packed = "packed_" if module.is_concatenated else ""  # else in turns
    return {"gate_up_proj": f"{packed}{up}", "down_proj": down}


def _with_whole_experts(model: nn.Module, styles: Styles) -> dict[str, str]:
    """The same styles with whole experts on each rank.

    Raises:
        ArgumentError: There are no experts that skip rows of others.
    """
    own = expanded(styles, model) if styles else {}
    experts = {fqn: m for fqn, m in model.named_modules() if takes_routes(m)}
    if not experts:
        raise ArgumentError(
            "Experts of Transformers can be shared as wholes (`tp_plan='expert'`), and"
            f" {type(model).__name__} has none: leave that out."
        )
    for fqn, module in experts.items():
        own[fqn] = WHOLE_EXPERTS
        for name, _ in module.named_parameters():
            own[f"{fqn}.{name}"] = "grouped_gemm"
    return own


# --- sequences ----------------------------------------------------------------


def _by_sequence(model: nn.Module, styles: Styles) -> dict[str, str]:
    """The same styles with a part of the sequence on each rank between the blocks.

    Raises:
        ArgumentError: The model is not a list of blocks with a norm after it.
    """
    own = expanded(styles, model)
    rows = [
        fqn
        for fqn, style in own.items()
        if style in TO_SEQUENCE and not is_of_parameter(fqn, own)
    ]
    experts = [fqn for fqn, style in own.items() if style in OF_EXPERTS]
    lists = {_list_around(model, fqn) for fqn in (*rows, *experts)}
    around = lists.pop() if len(lists) == 1 else None
    if around is None:
        raise _no_sequences("its divided modules do not lie in one list of blocks")
    blocks = list(model.get_submodule(around).named_children())
    own[f"{around}.{blocks[0][0]}"] = "whole_to_sequence"
    for name, block in blocks:
        own.update(_of_block(f"{around}.{name}", block, own))
    routed = tuple(f"{n}." for n, style in own.items() if style == "sequence_around")
    rows = [fqn for fqn in rows if not fqn.startswith(routed)]
    own.update((fqn, TO_SEQUENCE[own[fqn]]) for fqn in rows)
    own[_norm_after(model, around)] = "sequence_parallel_gather_output"
    return own


def _list_around(model: nn.Module, fqn: str) -> str | None:
    """The outermost list of modules around a module."""
    parts = fqn.split(".")
    for length in range(1, len(parts)):
        name = ".".join(parts[:length])
        if isinstance(model.get_submodule(name), (nn.ModuleList, nn.ModuleDict)):
            return name
    return None


def _of_block(fqn: str, block: nn.Module, own: Styles) -> dict[str, str]:
    """Styles of a block's children: norms see a part, what is divided gets all.

    What routes tokens to experts, or has keys that all heads share, hands on a part of
    what it makes of all.
    """
    styles = {}
    for name, child in _trained(block):
        inside = f"{fqn}.{name}"
        among = [n for n in own if n.startswith(f"{inside}.")]
        if own.get(inside) in OF_EXPERTS:
            raise _no_sequences(f"what routes to `{inside}` is a block")
        if any(own[n] in (*OF_EXPERTS, SHARED_KEYS) for n in among):
            styles[inside] = "sequence_around"
        elif among:
            styles[inside] = "sequence_to_whole"
        elif all(parameter.dim() == 1 for parameter in child.parameters()):
            styles[inside] = "sequence_parallel"
        else:
            raise _no_sequences(f"`{inside}` is neither a norm nor divided")
    return styles


def _norm_after(model: nn.Module, around: str) -> str:
    """The norm that follows a list of blocks."""
    outer, _, own_name = around.rpartition(".")
    names = [name for name, _ in model.get_submodule(outer).named_children()]
    for name in names[names.index(own_name) + 1 :]:
        fqn = f"{outer}.{name}" if outer else name
        parameters = list(model.get_submodule(fqn).parameters())
        if parameters:
            if all(parameter.dim() == 1 for parameter in parameters):
                return fqn
            break
    raise _no_sequences(f"no norm follows `{around}`")


def _no_sequences(why: str) -> ArgumentError:
    return ArgumentError(
        f"Sequence parallelism is not known for this model, as {why}: leave it to"
        " tensor parallelism, or pass `tp_plan` as a dict with its styles."
    )
