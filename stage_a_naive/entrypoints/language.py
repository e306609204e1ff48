"""The reader's language: `tr` gives a text in the one that the locale asks for, and English where there is no other.

English is the key. After a change of `locale/zh/LC_MESSAGES/six_engines.po` gettext's own tool makes the catalogue:

    msgfmt --check -o six_engines.mo six_engines.po
"""

import gettext
import unicodedata
from pathlib import Path

CATALOGUE = gettext.translation("six_engines", Path(__file__).with_name("locale"), fallback=True)
tr, counted = CATALOGUE.gettext, CATALOGUE.ngettext


def columns(text: str) -> int:
    """How many columns of a terminal a text takes; a Chinese character takes two."""
    return sum(1 + (unicodedata.east_asian_width(character) in "WF") for character in text)


def padded(text: str, width: int) -> str:
    """Fill a text with spaces up to a number of columns."""
    return text + " " * (width - columns(text))
