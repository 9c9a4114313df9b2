"""Packages of models of graphs, molecules and physical fields."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.models.drawn.packages.guessing import Package, classes_in
from benchmarks.models.workload import integers, normal

_NODES, _EDGES, _WIDTH = 64, 256, 16
_FEATURES, _ARCS = normal(_NODES, _WIDTH), integers(_NODES, 2, _EDGES)
_GRAPHS = torch.arange(_NODES) // 16


def _encoder(_: Any) -> nn.Module:
    from torch_geometric.nn import GCN  # optional

    return GCN(_WIDTH, 32, num_layers=2)


def _convolution(_: Any) -> nn.Module:
    from torch_geometric.nn import GCNConv  # optional

    return GCNConv(8, 8)


def _mlp(_: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(_WIDTH, 32), nn.ReLU(), nn.Linear(32, 32))


def _message_mlp(_: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(2 * _WIDTH, 32), nn.ReLU(), nn.Linear(32, 32))


def _default_or_width(default: Any) -> Any:
    return default if isinstance(default, (int, str, float)) else _WIDTH


_GRAPH_SETTINGS = {
    "in_channels": _WIDTH,
    "hidden_channels": 32,
    "hidden_node_channels": 32,
    "hidden_edge_channels": 32,
    "out_channels": 32,
    "channels": _WIDTH,
    "embedding_dim": 32,
    "num_layers": 3,
    "num_nodes": _NODES,
    "num_classes": 8,
    "num_rels": 4,
    "num_relations": 4,
    "num_timesteps": 2,
    "num_blocks": 2,
    "num_bilinear": 4,
    "num_spherical": 3,
    "num_radial": 4,
    "int_emb_size": 16,
    "basis_emb_size": 8,
    "out_emb_channels": 16,
    "num_interactions": 2,
    "edge_dim": 8,
    "depth": 2,
    "heads": 2,
    "dim": 2,
    "kernel_size": 3,
    "K": 3,
    "k": 4,
    "alpha": 0.1,
    "mode": "cat",
    "aggr": _default_or_width,
    "aggregators": ["mean", "max", "std"],
    "scalers": ["identity", "amplification"],
    "deg": torch.bincount(torch.bincount(_ARCS[1], minlength=_NODES)),
    "encoder": _encoder,
    "conv": _convolution,
    "nn": _mlp,
    "seq_len": 4,
    "walk_length": 8,
    "context_size": 4,
    "edge_index": _ARCS,
    "act": lambda default: default,
}

GEOMETRIC = Package(
    distribution="torch-geometric",
    models=lambda: classes_in(
        *("torch_geometric.nn.models", "torch_geometric.nn.conv")
    ),
    settings=(
        _GRAPH_SETTINGS,
        _GRAPH_SETTINGS | {"nn": _message_mlp},
        {**_GRAPH_SETTINGS, "heads": 1, "dim": 3},
    ),
    batches={
        "x": [_FEATURES, [_FEATURES, _FEATURES]],
        "xs": [[_FEATURES, _FEATURES]],
        "edge_index": _ARCS,
        "pos_edge_index": _ARCS,
        "neg_edge_index": _ARCS.flip(1),
        "edge_attr": [normal(_EDGES, 8), normal(_EDGES, 3).sigmoid()],
        "edge_weight": normal(_EDGES).sigmoid(),
        "edge_type": integers(4, _EDGES),
        "hyperedge_index": _ARCS,
        "batch": _GRAPHS,
        "z": [integers(20, _NODES), _FEATURES],
        "pos": normal(_NODES, 3),
        "y": integers(8, _NODES),
        "y_soft": _FEATURES.softmax(-1),
        "mask": torch.arange(_NODES) < 32,
        "x_0": _FEATURES,
        "h": _FEATURES,
    },
)

_IRREPS, _IRREPS_WIDTH = "8x0e+4x1o+2x2e", 8 + 12 + 10
E3NN = Package(
    distribution="e3nn",
    models=lambda: classes_in(
        *("e3nn.nn", "e3nn.o3", "e3nn.nn.models.v2106.gate_points_networks"),
        *("e3nn.nn.models.v2106.points_convolution",),
    ),
    settings=(
        {
            **dict.fromkeys(("irreps_in", "irreps", "irreps_out"), _IRREPS),
            **dict.fromkeys(("irreps_in1", "irreps_in2"), _IRREPS),
            "filter_ir_out": None,
            "hs": [_IRREPS_WIDTH, 32, 16],
            "act": lambda _: torch.tanh,
            "acts": [torch.tanh, None, None],
            "p": 0.5,
            "normalize": True,
            "l": 2,
            "num_neighbors": 4.0,
            "num_nodes": 16.0,
            "max_radius": 1.5,
            "mul": 8,
            "layers": 2,
            "lmax": 2,
            "irreps_node_input": _IRREPS,
            "irreps_node_output": _IRREPS,
            "irreps_node_attr": "4x0e",
            "irreps_edge_attr": "1x0e+1x1o",
            "fc_neurons": [8, 16],
        },
    ),
    batches={
        **dict.fromkeys(
            ("x", "input", "features", "x1", "x2"), normal(_NODES, _IRREPS_WIDTH)
        ),
        "y": normal(_NODES, _IRREPS_WIDTH),
        "node_input": normal(_NODES, _IRREPS_WIDTH),
        "node_attr": normal(_NODES, 4),
        "edge_src": _ARCS[0],
        "edge_dst": _ARCS[1],
        "edge_attr": normal(_EDGES, 4),
        "edge_scalars": normal(_EDGES, 8),
        "data": {
            "pos": normal(_NODES, 3),
            **{name: normal(_NODES, _IRREPS_WIDTH) for name in ("x", "node_input")},
            "node_attr": normal(_NODES, 4),
            "edge_attr": normal(_EDGES, 4),
            "edge_src": _ARCS[0],
            "edge_dst": _ARCS[1],
            "batch": _GRAPHS,
        },
    },
)


def _operator(_: Any) -> nn.Module:
    from neuralop.models import FNO  # optional

    return FNO(n_modes=(8, 8), in_channels=3, out_channels=3, hidden_channels=16)


_GRID = torch.stack(
    torch.meshgrid(*[torch.linspace(0, 1, 8)] * 3, indexing="ij"), dim=-1
)
NEURALOPERATOR = Package(
    distribution="neuraloperator",
    models=lambda: classes_in(
        *("neuralop.models", "neuralop.layers.fno_block"),
        "neuralop.layers.spectral_convolution",
        "neuralop.layers.coda_layer",
    ),
    settings=(
        {
            "n_modes": (8, 8),
            "in_channels": 3,
            "out_channels": 3,
            "hidden_channels": 16,
            "lifting_channels": 16,
            "projection_channels": 16,
            "n_layers": 4,
            "uno_out_channels": [16, 16, 16, 16],
            "uno_n_modes": [[8, 8]] * 4,
            "uno_scalings": [[1.0, 1.0], [0.5, 0.5], [1, 1], [2, 2]],
            "base_model": _operator,
            "default_in_shape": (32, 32),
            "output_variable_codimension": 1,
            "hidden_variable_codimension": 2,
            "use_positional_encoding": False,
            "scalings": [[1, 1], [1, 1], [1, 1], [1, 1]],
        },
        {
            "n_modes": [[8, 8]] * 4,
            "n_layers": 4,
            "n_heads": [2] * 4,
            "attention_scaling_factors": [1] * 4,
            "per_channel_attention": False,
            "output_variable_codimension": 3,
            "lifting_channels": 16,
            "projection_channels": 16,
        },
        {
            "in_channels": 3,
            "out_channels": 3,
            "fno_n_modes": (4, 4, 4),
            "n_modes": (4,),
        },
    ),
    batches={
        "x": normal(2, 3, 32, 32),
        "in_p": normal(1, 64, 3).sigmoid(),
        "out_p": normal(32, 3).sigmoid(),
        "f": normal(1, 8, 8, 8, 3),
        "input_geom": normal(1, 64, 3).sigmoid(),
        "latent_queries": _GRID[None],
        "output_queries": normal(1, 32, 3).sigmoid(),
    },
)
