from autosac.solving.path_relinking import relink
from autosac.units import curves
from tests.models import gpt_on_a_gpu


def test_units_of_a_relinked_choice_come_in_the_order_of_the_step():
    # Searches that begin there draw units by their place: plans must always be alike.
    profile = gpt_on_a_gpu()
    formulation = profile.formulation
    blocks = profile.rules.every_kth_block(1)
    parts = {}
    smallest = sorted(
        zip(formulation.units, formulation.curves, strict=True),
        key=lambda pair: pair[0].call.exit - pair[0].call.enter,
    )
    for unit, curve in smallest:
        if unit not in blocks and all(unit.is_apart_from(other) for other in parts):
            ms = {
                policy: curves.recompute_ms(unit, policy) for policy in curve.policies
            }
            parts[unit] = min(ms, key=lambda policy: ms[policy])

    relinked = relink(profile.simulator, blocks, parts, budget_bytes=2**60)

    assert len(relinked) > 2 * len(blocks)
    enters = [unit.call.enter for unit in relinked]
    assert enters == sorted(enters)
