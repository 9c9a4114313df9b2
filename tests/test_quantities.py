import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosac.quantities import format_bytes, format_ms, parse_bytes


@pytest.mark.parametrize(
    ("value", "num_bytes"),
    [
        (1, 1),
        (17_179_869_184, 17_179_869_184),
        ("24GiB", 24 * 2**30),
        ("24GB", 24 * 10**9),
        ("24G", 24 * 2**30),
        ("24 Gi", 24 * 2**30),
        ("512MiB", 512 * 2**20),
        ("1.5 gib", 3 * 2**29),
        (" .5kb ", 500),
        ("2TiB", 2 * 2**40),
        ("7 B", 7),
        ("0.0000000015GB", 1),  # fractions of a byte are dropped
        ("80%", 800),
        ("33.34 %", 333),
        ("100%", 1000),
    ],
)
def test_reads_bytes_units_and_percentages(value, num_bytes):
    assert parse_bytes(value, total_bytes=1000) == num_bytes


@pytest.mark.parametrize(
    "value",
    [
        *(0, -1, True, False, None, 24.0, float("nan")),
        *("", "24", "24i", "24iB", "-1GiB", "1e3MB", "nan", "GiB", "1,5GiB", "0GiB"),
        *("0%", "0.1B", "1..5GiB", "24GiB left"),
    ],
)
def test_refuses_anything_else_and_names_the_accepted_forms(value):
    message = re.escape(f"`cap`={value!r} must be a positive int of bytes or text")

    with pytest.raises(ValueError, match=message):
        parse_bytes(value, total_bytes=1000, name="cap")


def test_refuses_more_than_the_whole_device():
    with pytest.raises(ValueError, match=r"'120%' must be at most '100%'"):
        parse_bytes("120%", total_bytes=1000)


def test_a_percentage_needs_a_known_total():
    with pytest.raises(ValueError, match=r"`memory_budget`='80%' is a share, and here"):
        parse_bytes("80%")


def test_a_percentage_is_offered_only_where_it_can_be_meant():
    with pytest.raises(ValueError, match=r"'512MiB' or '80%'\.$"):
        parse_bytes("x", total_bytes=1000)
    with pytest.raises(ValueError, match=r"'24GB' or '512MiB'\.$"):
        parse_bytes("x")


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20 - 1, "1.0 MiB"),  # not 1024.0 KiB
        (16 * 2**30, "16.0 GiB"),
        (5000 * 2**40, "5000.0 TiB"),
        (-3 * 2**19, "-1.5 MiB"),
    ],
)
def test_writes_bytes_in_the_largest_fitting_unit(num_bytes, text):
    assert format_bytes(num_bytes) == text


@given(st.integers(min_value=2**10, max_value=2**50))
def test_written_bytes_read_back_within_a_twentieth_of_the_unit(num_bytes):
    # One decimal is off by at most 0.05 of a unit that is at most num_bytes / 0.99.
    assert abs(parse_bytes(format_bytes(num_bytes)) - num_bytes) <= 0.06 * num_bytes


@pytest.mark.parametrize(
    ("time_ms", "text"),
    [
        (0.0, "0.000 ms"),
        (0.1234, "0.123 ms"),
        (12.34, "12.3 ms"),
        (123.4, "123 ms"),
        (1234.0, "1.23 s"),
    ],
)
def test_writes_times_with_about_three_digits(time_ms, text):
    assert format_ms(time_ms) == text
