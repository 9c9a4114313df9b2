"""Whether a profiler is at work (private APIs, checked for torch 2.10 to 2.15).

Kineto has one session in a process. Another one that begins meanwhile fails, or ends
the first one and spoils what it recorded, or is silently empty; which of these depends
on the version, the thread and how far the first one is.
"""

from __future__ import annotations

import gc

import torch
from torch.autograd import profiler

__all__ = ["a_profiler_is_active"]


def a_profiler_is_active() -> bool:
    """Whether a profiler records or warms up, in this thread or in another one."""
    if profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled():
        return True
    # No flag tells of a session that warms up: only the object that will record it.
    sessions = gc.get_referrers(profiler.profile)
    return any(type(one) is profiler.profile and _is_pending(one) for one in sessions)


def _is_pending(session: profiler.profile) -> bool:
    """Whether a session was prepared and has not ended yet."""
    state = vars(session)  # of one that is disabled, all but empty
    return bool(state.get("entered")) and state.get("kineto_results") is None
