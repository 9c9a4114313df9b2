"""Whether a profiler is at work (private APIs, checked for torch 2.10 to 2.15).

Kineto has one session in a process. Another one that begins meanwhile fails, or ends
the first one and spoils what it recorded, or is silently empty; which of these depends
on the version, the thread and how far the first one is.
"""

from __future__ import annotations

import gc
import sys
import weakref
from typing import NamedTuple

import torch
from torch.autograd import profiler

__all__ = ["a_profiler_is_active"]


class _Known(NamedTuple):
    """What was found when all objects were looked through, a tenth of a second.

    Attributes:
        references: To the class of sessions: each session is one.
        ended: The sessions, if all had ended for good.
    """

    references: int
    ended: list[weakref.ref[profiler.profile]]

    def still_holds(self) -> bool:
        """Whether there is no other session since."""
        is_new = sys.getrefcount(profiler.profile) > self.references
        return not is_new and all(ref() is not None for ref in self.ended)


_known = _Known(-1, [])


def a_profiler_is_active() -> bool:
    """Whether a profiler records or warms up, in this thread or in another one."""
    if profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled():
        return True
    # No flag tells of a session that warms up: only the object that will record it.
    global _known
    if _known.still_holds():
        return False
    sessions = [o for o in gc.get_referrers(profiler.profile) if _is_session(o)]
    if all(map(_has_ended, sessions)):
        references = sys.getrefcount(profiler.profile)
        _known = _Known(references, [weakref.ref(session) for session in sessions])
    return any(map(_is_pending, sessions))


def _is_session(one: object) -> bool:
    return type(one) is profiler.profile


def _has_ended(session: profiler.profile) -> bool:
    """Whether a session has recorded what it ever will."""
    return vars(session).get("kineto_results") is not None


def _is_pending(session: profiler.profile) -> bool:
    """Whether a session was prepared and has not ended yet."""
    state = vars(session)  # of one that is disabled, all but empty
    return bool(state.get("entered")) and state.get("kineto_results") is None
