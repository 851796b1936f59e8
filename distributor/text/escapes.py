"""Finds and removes the escape sequences of terminals in the text of ranks. Pure functions."""

from __future__ import annotations

import re
from collections import deque

# Sources: ECMA-48; https://invisible-island.net/xterm/ctlseqs/ctlseqs.html. Each sequence has a second form, in which
# one character from U+0080 to U+009F replaces the first two characters.

#: The start and the end of a control string (OSC, DCS, SOS, PM, APC), whose text is not shown.
_STRING = r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])"
_END = r"(?:\x07|\x1b\\|\x9c)"

#: Any sequence, and what makes a terminal answer (ENQ) or change its character set (SO, SI). No text between two
#: sequences is searched twice: the time of a search is proportional to the text's length.
_SEQUENCE = re.compile(
    rf"{_STRING}[^\x07\x1b\x80-\x9f]*{_END}"  # the end may be some lines below
    rf"|{_STRING}(?:[^\n\x07\x1b\x80-\x9f]|\x1b\x1b)*{_END}?"  # a string without an end goes to the end of its line
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"
    r"|\x1b[ -/]*[0-~]?"
    r"|[\x05\x0e\x0f\x80-\x9f]"
)

#: A sequence that sets colours and other attributes of characters (SGR).
_COLOUR = re.compile(r"(?:\x1b\[|\x9b)([0-9;:]*)m")

#: A sequence that may go on in the next text. The groups match what is needed to recognize its rest.
_OPEN = re.compile(
    rf"({_STRING})(?:[^\n\x07\x1b\x80-\x9f]|\x1b\x1b)*(\x1b?)\Z|((?:\x1b\[|\x9b)[0-?]*[ -/]*|\x1b[ -/]*)\Z"
)

#: Characters of an unfinished sequence to keep. No sequence that a terminal knows is longer.
_LONGEST_OPEN = 64

_SEVEN_BIT = re.compile("[\x1b\x05\x0e\x0f]")
_EIGHT_BIT = re.compile(r"[\x80-\x9f]")


def colours(text: str) -> str:
    """Return a text without escape sequences, except for those that set colours and other attributes (SGR).

    >>> colours("\\x1b]0;title\\x07\\x1b[31mloss\\x1b[0m 0.5\\x1b[2K")
    '\\x1b[31mloss\\x1b[0m 0.5'
    """
    return _SEQUENCE.sub(_colour, text) if _has_any(text) else text


def plain(text: str) -> str:
    """Return a text without escape sequences.

    >>> plain("\\x1b]0;title\\x07\\x1b[31mloss\\x1b[0m 0.5")
    'loss 0.5'
    """
    return _SEQUENCE.sub("", text) if _has_any(text) else text


def open_end(text: str) -> str:
    """Return what to put before the next text, so that an escape sequence that ``text`` leaves open is recognized.

    >>> open_end("loss 0.5\\x1b]52;c;aGVs"), open_end("loss 0.5\\x1b[3"), open_end("loss 0.5")
    ('\\x1b]', '\\x1b[3', '')
    """
    last = deque(_SEQUENCE.finditer(text) if _has_any(text) else (), maxlen=2)  # of a string with half of its end, two
    for match in (_OPEN.match(text, sequence.start()) for sequence in last):
        if match is not None:
            return str(match[3])[:_LONGEST_OPEN] if match[1] is None else match[1] + match[2]
    return ""


def end_of(text: str, most: int) -> str:
    """Return the last ``most`` characters of a text, or fewer if a sequence that sets colours would be cut in two.

    >>> end_of("loss \\x1b[31m0.5", 6), end_of("loss", 6)
    ('0.5', 'loss')
    """
    start = max(0, len(text) - most)
    for colour in _COLOUR.finditer(text):
        if colour.start() < start < colour.end():
            start = colour.end()
    return text[start:]


def _colour(sequence: re.Match[str]) -> str:
    colour = _COLOUR.fullmatch(sequence[0])
    return "" if colour is None else f"\x1b[{colour[1]}m"


def _has_any(text: str) -> bool:
    if _SEVEN_BIT.search(text) is not None:
        return True
    return not text.isascii() and _EIGHT_BIT.search(text) is not None
