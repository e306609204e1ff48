"""The reader's language: `tr` translates a text into the locale's language; without a translation it stays English.

The English text is the key. After a change to `locale/zh/LC_MESSAGES/six_engines.po`, gettext's tool compiles the
catalogue:

    msgfmt --check -o six_engines.mo six_engines.po
"""

import gettext
import unicodedata
from pathlib import Path

CATALOGUE = gettext.translation("six_engines", Path(__file__).with_name("locale"), fallback=True)
tr, counted = CATALOGUE.gettext, CATALOGUE.ngettext


def columns(text: str) -> int:
    """Return how many terminal columns a text takes; a Chinese character takes two."""
    return sum(1 + (unicodedata.east_asian_width(character) in "WF") for character in text)


def padded(text: str, width: int) -> str:
    """Pad a text with spaces to a number of columns."""
    return text + " " * (width - columns(text))
