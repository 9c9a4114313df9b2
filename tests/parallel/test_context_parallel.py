"""Context parallelism: parts of a sequence, what ranks do with them, and plans."""

import gc
import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import autosac
from autosac._compat_distributed import fake_group
from autosac.costs.kernels import computed_flops
from autosac.devices.specs import device_spec
from autosac.parallel import cp_tracing, tp_tracing
from autosac.parallel.clusters import cluster_spec
from autosac.parallel.context_parallel import ContextParallel, Exchange, UlyssesMode
from autosac.parallel.formulating import ParallelFormulation, Setting
from autosac.parallel.ring_attention import RingMode
from autosac.parallel.sequence_parts import part_of
from autosac.parallel.tp_finding import find_styles
from autosac.parallel.tp_styles import TensorParallel
from autosac.step.training_step import finish_step, micro_step
from benchmarks import allocator_shim, mesh_ranks, rank_models
from benchmarks.rank_server import run_ranks
from tests.parallel.test_meshes import labelled, llama

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 16, 8
SPEC = replace(cluster_spec("pcie-l40s", num_gpus=4), device=device_spec("cpu"))
GPU = {"cluster": "hgx-h100", "num_gpus": 8, "memory_budget": "60GiB"}


# --- attention on real ranks --------------------------------------------------


def _mirrored(tensor, rank, degree):
    """A part near the beginning, and its mirror image near the end."""
    chunks = tensor.chunk(2 * degree, 2)
    return torch.cat([chunks[rank], chunks[2 * degree - 1 - rank]], 2)


def _consecutive(tensor, rank, degree):
    return tensor.chunk(degree, 2)[rank].contiguous()


def _attend_in_parts(rank, degree):
    name = dist.group.WORLD.group_name
    ulysses, ring = UlyssesMode(Exchange(name, degree)), RingMode(name, None)
    cases = itertools.product((True, False), (HEADS, 2, 1), (ulysses, ring))
    for is_causal, num_heads, mode in cases:
        torch.manual_seed(0)
        sizes = (
            (BATCH, HEADS, LENGTH, WIDTH),
            *2 * ((BATCH, num_heads, LENGTH, WIDTH),),
        )
        whole = [torch.randn(size, requires_grad=True) for size in sizes]
        gradient = torch.randn(sizes[0])
        attend = partial(
            functional.scaled_dot_product_attention,
            is_causal=is_causal,
            enable_gqa=num_heads < HEADS,
        )
        wanted = attend(*whole)
        wanted.backward(gradient)
        cut = _mirrored if mode is ring and is_causal else _consecutive
        parts = [cut(t.detach(), rank, degree).requires_grad_() for t in whole]
        with mode:
            out = attend(*parts)
        out.backward(cut(gradient, rank, degree))
        torch.testing.assert_close(out, cut(wanted, rank, degree))
        for part, own in zip(parts, whole, strict=True):
            torch.testing.assert_close(part.grad, cut(own.grad, rank, degree))


@pytest.mark.slow
@pytest.mark.parametrize("degree", [2, 4])
def test_ranks_attend_to_the_whole_sequence(degree):
    run_ranks(_attend_in_parts, degree, degree)


class Mixing(nn.Module):
    """Attention and nothing else, of which a peak is made."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(rank_models.Attention() for _ in range(3))

    def forward(self, x, position_ids=None):
        for layer in self.layers:
            x = x + layer(x)
        return x


def softplus(output):
    return functional.softplus(output.float()).mean()


def _held_by_rings(rank, context, inputs):
    torch.backends.mkldnn.set_flags(False)
    gc.collect()
    dist.barrier()  # which leaves something behind
    before_bytes = allocator_shim.live_bytes()
    model = Mixing()
    context.install(model, RingMode(dist.group.WORLD.group_name, None))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = inputs.clone()  # there beside the part, as in a loop
    args, kwargs = part_of(((batch,), {}), context, rank)
    peaks = []
    for _ in range(4):
        gc.collect()
        dist.barrier()
        allocator_shim.reset()
        micro_step(model, args, kwargs, loss_fn=softplus, autocast=None, accumulate=1)
        finish_step(model, optimizer, None)
        model.zero_grad()
        peaks.append(allocator_shim.peak_bytes() - before_bytes)
    return min(peaks[1:])


@pytest.mark.slow
@pytest.mark.skipif(allocator_shim.library() is None, reason="needs a C compiler")
@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # oneDNN is switched off
def test_each_rank_of_a_ring_holds_what_its_trace_says():
    degree, inputs = 4, torch.randn(2, 512, 96)
    profile = autosac.calibrate(
        autosac.profile(Mixing(), inputs, loss_fn=softplus, optimizer="adamw")
    )
    context = cp_tracing.context_of(profile, degree, "ring")
    measured = run_ranks(_held_by_rings, degree, context, inputs)
    traced = [
        cp_tracing.traced_at(profile, context, place, Setting()).baseline_peak_bytes
        for place in range(degree)
    ]
    for own, peak in zip(traced, measured, strict=True):
        assert 0 <= own / peak - 1 <= 0.01, (traced, measured)
    assert max(traced) == max(traced[0], traced[-1])


# --- parts of a batch ---------------------------------------------------------


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_parts_put_together_are_the_batch(degree):
    context = ContextParallel(degree=degree, positions="position_ids")
    tokens, scale = torch.arange(32).view(2, 16), torch.tensor(2.0)
    parts = [
        part_of(((tokens,), {"scale": scale}), context, index)
        for index in range(degree)
    ]
    assert torch.equal(torch.cat([args[0] for args, _ in parts], 1), tokens)
    positions = [kwargs["position_ids"] for _, kwargs in parts]
    assert torch.equal(torch.cat(positions, 1), torch.arange(16)[None])
    assert all(kwargs["scale"] is scale for _, kwargs in parts)


@pytest.mark.parametrize("degree", [2, 4])
def test_the_mean_loss_of_parts_is_that_of_the_whole(degree):
    # Parts differ in how many labels count; logits are those of the tokens alone.
    model = llama()
    model.model.layers = nn.ModuleList()
    inputs = labelled()
    inputs["labels"][:, 2:9] = -100
    context = ContextParallel(
        degree=degree, positions="position_ids", shifts_labels=True
    )
    losses = []
    for index in range(degree):
        _, kwargs = part_of(((), inputs), context, index)
        losses.append(model(**kwargs).loss)
    whole = model(**inputs).loss
    torch.testing.assert_close(torch.stack(losses).mean(), whole)


def test_a_call_without_positions_is_refused():
    model = mesh_ranks.GPT()
    context = ContextParallel(
        degree=2, attentions=("h.0.attn",), positions="position_ids"
    )
    with fake_group(2):
        context.apply(model, init_device_mesh("cpu", (2,)))
        with pytest.raises(autosac.ArgumentError, match=r"plan\.part_of"):
            model(torch.zeros(1, 8, dtype=torch.long))


# --- what cannot be -----------------------------------------------------------


def tokens():
    return mesh_ranks.RECIPES["GPT"].inputs()


MISUSED = (
    (
        {"mesh": {"cp": 2, "tp": 2}},
        autosac.ArgumentError,
        "3 heads.* one of tp=2 ranks",
    ),
    ({"mesh": {"cp": 4, "tp": 4}}, autosac.ArgumentError, "do not fit 8 GPUs"),
    ({"mesh": {"cp": 3}}, autosac.ArgumentError, "must be one of 1, 2, 4, 8"),
    ({"mesh": {"cp": 2}, "cp_method": "rings"}, autosac.ArgumentError, "'rings'"),
    ({"mesh": {"tp": 1}, "cp_method": "ring"}, autosac.ArgumentError, "{'cp': 2}"),
    ({"mesh": {"cp": 2}, "degrees": [1]}, autosac.ArgumentError, "multiple of cp=2"),
)


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize(("options", "error", "why"), MISUSED)
def test_what_a_mesh_cannot_be_is_refused(options, error, why):
    with pytest.raises(error, match=why):
        autosac.plan_parallel(
            mesh_ranks.GPT(), tokens(), loss_fn=softplus, **GPU, **options
        )


def test_a_process_that_is_a_rank_plans_no_mesh():
    with fake_group(2), pytest.raises(autosac.ArgumentError, match="before"):
        autosac.plan_parallel(
            mesh_ranks.GPT(), tokens(), loss_fn=softplus, mesh={"cp": 2}, **GPU
        )


# --- time ---------------------------------------------------------------------


def _step(*kinds):
    """Ops of a tape: ("op" | "send", ms, place of the op whose result it reads)."""
    ops = []
    for i, (kind, _, source) in enumerate(kinds):
        name = (
            "_c10d_functional.all_to_all_single.default" if kind == "send" else "aten.x"
        )
        reads = () if source is None else (source,)
        ops.append(_Op(name, reads, (i,)))
    return ops, [ms for _, ms, _ in kinds]


class _Op:
    def __init__(self, name, reads, creates):
        self.name, self.reads, self.creates = name, reads, creates


def test_only_what_compute_does_not_hide_is_waited_for():
    # 3 ms of sending beside 2 ms of compute: 1 ms is left. What is read at once is
    # waited for in full; two that run one after the other, in the order of sending.
    assert cp_tracing.waits_ms(
        *_step(("send", 3, None), ("op", 2, None), ("op", 1, 0))
    ) == {0: 1}
    assert cp_tracing.waits_ms(*_step(("send", 3, None), ("op", 1, 0))) == {0: 3}
    assert cp_tracing.waits_ms(
        *_step(("send", 3, None), ("send", 4, None), ("op", 5, None), ("op", 1, 1))
    ) == {0: 0, 1: 2}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("op", "send")), st.integers(0, 9), st.integers(1, 5)
        ),
        max_size=12,
    )
)
def test_waits_are_never_more_than_what_is_sent(drawn):
    steps = [
        (kind, ms, i - back if i >= back else None)
        for i, (kind, ms, back) in enumerate(drawn)
    ]
    waits = cp_tracing.waits_ms(*_step(*steps))
    sent = {i: ms for i, (kind, ms, _) in enumerate(steps) if kind == "send"}
    assert set(waits) == set(sent)
    assert 0 <= sum(waits.values()) <= sum(sent.values())


# --- plans --------------------------------------------------------------------


@pytest.fixture(scope="module")
def profile():
    recipe = mesh_ranks.RECIPES["GPT"]
    return recipe.profile()


def cpu_plan(profile, cap, **options):
    return autosac.plan_parallel(profile, cluster=SPEC, memory_budget=cap, **options)


@pytest.fixture(scope="module")
def least(profile):
    with pytest.raises(autosac.InfeasibleBudgetError) as caught:
        cpu_plan(profile, 1000, mesh={"cp": 2})
    return caught.value.lowest_peak_bytes


@pytest.mark.slow
def test_a_plan_says_what_ranks_share_and_can_be_saved(profile, least, tmp_path):
    plan = cpu_plan(profile, least, mesh={"cp": None})
    assert plan.highest_peak_bytes <= least
    assert plan.context.degree > 1  # a whole sequence takes more
    assert plan.mesh_dim_names == ("shard", "cp")
    assert plan.mesh_shape == (4 // plan.context.degree, plan.context.degree)
    assert plan.batches_per_s == 4e3 / plan.context.degree / plan.step_ms
    assert 0 < plan.exchange_ms <= plan.compute_ms
    assert "all-to-all of heads" in str(plan)
    degrees = [other.cp_degree for other in plan.alternatives]
    assert {1, 2, 4} - {plan.context.degree} <= set(degrees)
    plan.save(tmp_path / "plan.json")
    assert autosac.ParallelPlan.load(tmp_path / "plan.json") == plan


@pytest.mark.slow
def test_a_plan_with_replicas_of_parts_is_applied_on_its_mesh(profile, least):
    plan = cpu_plan(profile, least, mesh={"cp": 2})
    sharding = replace(plan.sharding, shard_degree=2, replicate_degree=2)
    plan = replace(plan, sharding=sharding)
    model = mesh_ranks.RECIPES["GPT"].model()
    with fake_group(4):
        mesh = plan.make_mesh("cpu")
        assert mesh.mesh_dim_names == ("replicate", "shard", "cp")
        plan.apply(model, mesh)
        assert {p.device_mesh.shape for p in model.parameters()} == {(2, 2)}


@pytest.fixture(scope="module")
def profile_of_eight():
    return mesh_ranks.RECIPES["GPT8"].profile()


@pytest.mark.slow
def test_a_plan_with_slices_and_parts_says_both(profile_of_eight, tmp_path):
    mesh = {"cp": 2, "tp": 2}
    with pytest.raises(autosac.InfeasibleBudgetError, match="with tp=2 and cp=2"):
        cpu_plan(profile_of_eight, 1000, mesh=mesh)
    plan = cpu_plan(profile_of_eight, "64MiB", mesh=mesh)
    assert plan.mesh_dim_names == ("shard", "cp", "tp")
    assert plan.mesh_shape == (1, 2, 2)
    assert plan.sharding.shard_degree == 2  # over the ranks of a sequence
    assert plan.batches_per_s == 1e3 / plan.step_ms
    assert "tensor" in str(plan) and "all-to-all of heads" in str(plan)
    plan.save(tmp_path / "plan.json")
    assert autosac.ParallelPlan.load(tmp_path / "plan.json") == plan


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(4))
def test_ranks_that_share_slices_have_the_same_part(profile_of_eight, rank):
    plan = cpu_plan(profile_of_eight, "64MiB", mesh={"cp": 2, "tp": 2})
    batch = torch.arange(64)[None].repeat(4, 1)
    with fake_group(4, rank):
        (own,), _ = plan.part_of(batch, plan.make_mesh("cpu"))
    assert torch.equal(own, batch.chunk(2, 1)[rank // 2])


@pytest.mark.slowest
def test_all_meshes_of_slices_and_parts_compete(profile_of_eight):
    plan = cpu_plan(profile_of_eight, "1GiB", mesh={"cp": None, "tp": None})
    assert plan.division.degree == 1  # everything fits: nothing is to be exchanged
    assert plan.step_ms == cpu_plan(profile_of_eight, "1GiB").step_ms
    lost = {(other.cp_degree, other.tp_degree) for other in plan.alternatives}
    assert {(1, 2), (1, 4), (2, 1), (2, 2), (4, 1)} <= lost
    assert all(cp * tp <= 4 for cp, tp in lost)


def test_no_parts_are_what_is_planned_without(profile):
    assert cpu_plan(profile, "1GiB", mesh={"cp": 1}) == cpu_plan(profile, "1GiB")
    best = cpu_plan(profile, "1GiB", mesh={"cp": None})
    assert best.context.degree == 1  # everything fits: nothing is to be exchanged
    assert best.step_ms == cpu_plan(profile, "1GiB").step_ms


def test_nothing_fits_below_the_least_peak(profile, least):
    with pytest.raises(autosac.InfeasibleBudgetError, match="with cp=2"):
        cpu_plan(profile, least - 1, mesh={"cp": 2})


@pytest.mark.slow
def test_more_memory_is_never_slower(profile, least):
    caps = [int(least * share) for share in (1, 1.1, 1.25, 1.5, 2, 4)]
    plans = [cpu_plan(profile, cap, mesh={"cp": 2}) for cap in caps]
    times = [plan.step_ms for plan in plans]
    assert all(fast <= slow for slow, fast in itertools.pairwise(times))
    assert all(
        plan.highest_peak_bytes <= cap for plan, cap in zip(plans, caps, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_faster_links_are_never_slower(profile, method):
    def waits_ms(factor):
        fabric = SPEC.fabric
        links = replace(
            fabric,
            intra_bandwidth_bytes_per_s=factor * fabric.intra_bandwidth_bytes_per_s,
        )
        context = cp_tracing.context_of(profile, 2, method)
        spec = replace(SPEC, fabric=links)
        rank = cp_tracing.rank_profile(profile, context, spec, Setting())
        return cp_tracing.exchange_ms(rank)

    slow, fast, *_ = times = [waits_ms(factor) for factor in (0.01, 1, 100)]
    assert slow > fast
    assert times == sorted(times, reverse=True)


@pytest.mark.slow
@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("method", ["ulysses", "ring"])
@pytest.mark.parametrize("degree", [2, 4])
def test_a_part_of_causal_attention_costs_a_part(method, degree):
    # Ulysses: some of the heads. A ring: as many of the scores that are not hidden.
    inputs = torch.empty(1, 4096, 96, dtype=torch.bfloat16, device="meta")
    model = MixingTwelve().to("meta", torch.bfloat16)
    profile = autosac.profile(model, inputs, loss_fn=softplus, device="h100")
    context = cp_tracing.context_of(profile, degree, method)
    spec = cluster_spec("hgx-h100")
    rank = cp_tracing.rank_profile(profile, context, spec, Setting())
    assert _attention_flops(rank) == _attention_flops(profile) / degree > 0


class MixingTwelve(Mixing):
    """With heads that four ranks can share."""

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.head_dim = 8


def _attention_flops(profile):
    return sum(
        computed_flops(op.name, op.signature, op.flops)
        for op in profile.tape.ops
        if "_scaled_dot" in op.name
    )


@pytest.mark.slowest
@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_a_rank_with_slices_and_a_part_does_a_share_of_both(method):
    # What ranks exchange for tensors is of a part of the sequence, and what they
    # exchange for attention is of the heads that a rank has.
    profile = mesh_ranks.RECIPES["GPT8"].profile()
    model = profile.step.model
    tensor = TensorParallel(degree=2, styles=find_styles(model))
    context = cp_tracing.context_of(profile, 2, method)
    both = cp_tracing.rank_profile(profile, context, SPEC, Setting(), tensor)
    part = cp_tracing.rank_profile(profile, context, SPEC, Setting())
    slices = tp_tracing.rank_profile(profile, tensor, SPEC, Setting())
    for name, alone in (("all_to_all", part), ("all_reduce", slices)):
        sent = _sent_in_forward(both, name)
        assert sent
        assert [2 * nbytes for nbytes in sent] == _sent_in_forward(alone, name)


def _sent_in_forward(profile, name):
    return [
        op.moved_bytes
        for op in profile.tape.ops
        if f".{name}" in op.name and op.phase == "forward"
    ]


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_what_attention_keeps_can_be_recomputed(profile, method):
    context = cp_tracing.context_of(profile, 2, method)
    rank = cp_tracing.rank_profile(profile, context, SPEC, Setting())
    units = {unit.fqn: unit for unit in ParallelFormulation(rank, Setting()).units}
    needed = [group for group in units["h.0"].groups if group.needed]
    assert len(needed) >= 9
    assert all(group.saved_bytes and not group.pinned for group in needed)


@pytest.mark.slow
def test_rings_are_predicted_and_not_applied(profile, least):
    plan = cpu_plan(profile, 4 * least, mesh={"cp": 2}, cp_method="ring")
    assert "cannot be applied" in str(plan)
    with fake_group(4), pytest.raises(autosac.UnsupportedError, match="'ulysses'"):
        plan.apply(mesh_ranks.GPT(), plan.make_mesh("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_a_model_for_gpus_is_planned_on_the_meta_device(method):
    with torch.device("meta"):
        model = llama().to(torch.bfloat16)
        inputs = {
            name: torch.zeros(1, 2048, dtype=torch.long)
            for name in ("input_ids", "labels")
        }
    plan = autosac.plan_parallel(
        model, inputs, mesh={"cp": 2}, cp_method=method, optimizer="adamw", **GPU
    )
    assert plan.mesh_shape[-1] == 2
    assert plan.context.attentions == tuple(
        f"model.layers.{i}.self_attn" for i in range(2)
    )


@pytest.mark.slowest_but_first
@pytest.mark.skipif(allocator_shim.library() is None, reason="needs a C compiler")
@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # oneDNN is switched off
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(
    ("name", "degree", "kind", "num_caps"),
    [
        ("LLAMA", 2, mesh_ranks.CONTEXT, 1),  # the tight cap
        ("GPT", 2, mesh_ranks.CONTEXT, 2),
        ("LLAMA8", 1, mesh_ranks.BOTH[2], 1),
    ],
)
def test_real_ranks_keep_cap_prediction_and_gradients(
    short_models, name, degree, kind, num_caps
):
    planned = mesh_ranks.planned(name, 4, degree, (kind,))
    cells = list(itertools.islice(planned, num_caps))
    assert all(cell.plan.policy for cell in cells)
    for row in mesh_ranks.run_ranks(cells, 4):
        assert row.is_kept, row
