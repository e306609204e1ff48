"""Calls of one engine from several threads: mailboxes, aborts, and steps that break off.

The ring (`stage_e_batching/engine.py`) runs one step after the other and asks nothing of anybody. Here is what makes it
safe to call from everywhere: one lock around a step and around a change of the queues (`calls.py`), a mailbox for the
news of each call (`mailbox.py`), and recovery from an interrupt between any two lines of either.
"""

from stage_e_batching.calls.calls import Calls
from stage_e_batching.calls.mailbox import Event, Mailbox, Token

__all__ = ["Calls", "Event", "Mailbox", "Token"]
