"""HiGHS that prints no greeting when it is made."""

from __future__ import annotations

import highspy


class QuietHighs(highspy.Highs):
    """HiGHS that prints nothing.

    `highspy` 1.16 prints a greeting as soon as callbacks are enabled, and enables them
    as it makes an instance, before one can say that it should not.
    """

    def enableCallbacks(self) -> None:
        """Enable callbacks without printing anything."""
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()  # type: ignore[no-untyped-call]
