"""Calls of one engine from several threads: mailboxes, aborts, and steps that break off.

The engine (`stage_e_batching/engine.py`) runs one step after the other and knows nothing of threads. This package makes
it safe to call from any thread: one lock is held during a step and during a change of the queues (`calls.py`), every
call has a mailbox for its results (`mailbox.py`), and both recover from an interrupt between any two lines.
"""

from stage_e_batching.calls.calls import Calls
from stage_e_batching.calls.mailbox import Event, Mailbox, Token

__all__ = ["Calls", "Event", "Mailbox", "Token"]
