import pytest

from benchmarks.comparing import frontier

MIB = 2**20


def cell(mib, ratio):
    return {"measured_bytes": mib * MIB, "time_ratio": ratio}


def model(*, ours, eager=600, theirs=600, floor=100):
    return {
        "ours": ours,
        "floor_bytes": floor * MIB,
        "eager_bytes": eager * MIB,
        "their_eager_bytes": None if theirs is None else theirs * MIB,
    }


def point(mib, ratio=1.3):
    return {"peak_bytes": mib * MIB, "time_ratio": ratio}


@pytest.mark.parametrize(
    ("ratio", "said"),
    [(1.2, "below: "), (1.3, "below: "), (1.35, "on it, "), (1.5, "**above**: ")],
)
def test_the_frontier_is_judged_by_the_fastest_plan_that_fits(ratio, said):
    ours = [cell(150, ratio + 0.1), cell(199, ratio), cell(201, 1.0)]

    assert frontier.verdict(model(ours=ours), point(200)).startswith(said)


def test_a_floor_above_a_published_peak_is_told():
    verdict = frontier.verdict(model(ours=[cell(150, 1.4)], floor=150), point(140))

    assert verdict == "**above**: our floor is 150.0 MiB"


def test_a_model_lighter_than_theirs_has_to_be_as_much_below_their_peaks():
    ours = [cell(195, 1.2)]

    assert frontier.verdict(model(ours=ours), point(200)).startswith("below")
    lighter = model(ours=ours, eager=500, floor=195)
    assert frontier.verdict(lighter, point(200)).startswith("**above**")
    # A heavier one is not let off.
    heavier = model(ours=[cell(205, 1.2)], eager=700, floor=205)
    assert frontier.verdict(heavier, point(200)).startswith("**above**")
    unknown = model(ours=ours, eager=500, theirs=None)
    assert frontier.verdict(unknown, point(200)).startswith("below")
