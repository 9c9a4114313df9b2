import numpy as np

from autosac.solving.corrections import Rows
from autosac.step.ledger import Timeline


def array(*values):
    return np.array(values, dtype=np.int64)


def test_rows_that_a_choice_broke_are_raised_by_what_was_understated():
    rows = Rows(near_bytes=1)

    raised = rows.after_breaking(array(0, 5, 0), array(3, 2, -4), kept=array(2, 9, 9))

    assert raised.tolist() == [3, 5, 0]
    assert rows.between() is None


def test_rows_that_were_raised_too_far_come_down_half_way():
    rows = Rows(near_bytes=1)
    rows.after_breaking(array(0, 0), array(8, 4), kept=array(0, 4))
    assert rows.after_fitting(array(8, 4), array(0, 0), overstated=False) is None

    assert rows.between().tolist() == [4, 2]
    rows.after_breaking(array(4, 2), array(9, 9), kept=array(4, 2))
    assert rows.between().tolist() == [6, 3]
    rows.enough = array(6, 3)
    assert rows.between().tolist() == [5, 2]
    rows.enough = array(5, 2)
    assert rows.between() is None


def test_rows_that_the_broken_choice_keeps_are_not_tried_again():
    rows = Rows(near_bytes=1)
    rows.after_breaking(array(0, 0), array(8, 4), kept=array(6, 9))
    rows.enough = array(8, 4)

    assert rows.between().tolist() == [7, 3]
    rows.after_breaking(array(7, 3), array(9, 4), kept=array(9, 9))
    assert rows.between() is None


def test_rows_come_down_where_the_milp_saw_more_than_there_is():
    rows = Rows(near_bytes=1)

    lower = rows.after_fitting(array(0, 0), array(-7, 2), overstated=True)

    assert lower.tolist() == [-7, 0]


def test_the_most_of_a_stretch_counts_what_is_alive_as_it_begins():
    # 10 bytes from 0 on, 30 from 4, 20 from 5, 5 from 9.
    timeline = Timeline(keys=array(0, 4, 5, 9), live_bytes=array(10, 30, 20, 5))

    assert timeline.most_from(array(0, 3, 5, 6, 8, 9)).tolist() == [
        10,
        30,
        20,
        20,
        20,
        5,
    ]
    assert timeline.most_from(array(1, 7)).tolist() == [30, 20]
