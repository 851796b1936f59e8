"""Finds out what ranks are doing from the text that ``faulthandler`` writes in each of them.

The functions never raise, whatever the text: it may be cut off, or say why a rank cannot answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distributor.text.wording import who

#: The line before a thread's frames. "Stack" stands for a single thread, or for one of free-threaded Python.
_HEADER = re.compile(r"^(?:(?:Current thread|Thread) .*|Stack )\(most recent call first\):$", re.MULTILINE)
#: A frame, in a file or in a notebook cell, which the driver has named.
_FRAME = re.compile(r'  (?:File (?:"(.*)"|\?\?\?)|(Cell In\[\d+\])), line (?:([0-9]{1,9})|\?\?\?) in (.*)')

#: Differ between ranks that do the same.
_ADDRESS = re.compile(r"\b0x[0-9a-f]+")

_RANK = re.compile(r"(^|/)distributor/rank/process\.py$")
#: On a stack, these come between ``_RANK`` and user code.
_STARTER = re.compile(r"(^|/)distributor/shipping/pickling\.py$|^<frozen runpy>$|/lib(64)?/python[^/]*/runpy\.py$")
_LIBRARY = re.compile(
    r"/lib(64)?/python\d[^/]*/|/(site|dist)-packages/|^<frozen .*>$"
    r"|(^|/)distributor/(node/(launcher|rank_supervisor)|shipping/pickling|rank/(process|result))\.py$"
    r"|/package\.zip/distributor/"
)
#: Code without a file: generated, or typed at a prompt.
_NO_FILE = re.compile(r"<.*>$")

#: Functions that only call another one. Summaries do not name them.
_WRAPPERS = (
    "__call__",
    "_call_impl",
    "_fn",
    "_use_grad",
    "_wrapped",
    "_wrapped_call_impl",
    "decorate_context",
    "inner",
    "wrapper",
)


@dataclass(frozen=True)
class Frame:
    """One call on a stack. ``line`` is 0 and ``file`` is ``"???"`` if Python does not know them."""

    file: str  # or "Cell In[2]"
    line: int
    function: str


@dataclass(frozen=True)
class Thread:
    """A thread of a rank."""

    current: bool  # it has answered the signal that requests the stacks
    frames: tuple[Frame, ...]  # at most 100, innermost first; empty if it runs no Python code


class Stacks(dict[int, str]):
    """What ranks are doing: the text of the stacks of each rank's threads, by rank.

    ``str()`` returns a line that says at which lines of code the ranks are, followed by the stacks, without the frames
    that belong to the start of a rank. If several ranks have the same stack, it is shown once.

    Example:
        >>> print(Stacks({0: "no answer within 5 s", 1: "no answer within 5 s"}))
        ranks 0-1: no answer within 5 s
        <BLANKLINE>
        ranks 0-1:
        no answer within 5 s
    """

    def __str__(self) -> str:
        if not self:
            return "no ranks are running"
        texts = {rank: trim(text).strip("\n") for rank, text in self.items()}
        groups = _groups({rank: _ADDRESS.sub("", text) for rank, text in texts.items()})
        return "\n\n".join([summary(self), *(f"{who(ranks)}:\n{texts[ranks[0]]}" for ranks in groups.values())])


def parse(text: str) -> tuple[Thread, ...]:
    """Return the threads in what ``faulthandler.register(...)`` writes, in its order; empty for any other text.

    >>> parse('Current thread 0x1 (most recent call first):\\n  File "/home/me/train.py", line 40 in train\\n')
    (Thread(current=True, frames=(Frame(file='/home/me/train.py', line=40, function='train'),)),)
    """
    return tuple(_thread(block) for block in _blocks(text)[1:])


def main_thread(threads: Sequence[Thread]) -> Thread | None:
    """Return the thread that answered the signal, as the main thread does, or else the oldest, which is listed last."""
    return next((thread for thread in threads if thread.current), threads[-1] if threads else None)


def where(text: str) -> str:
    """Return what a rank does: the function that its main thread has called, and the line of user code that called it.

    >>> where('''Current thread 0x00007f8d69c73b80 (most recent call first):
    ...   File "/opt/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", line 3195 in all_reduce
    ...   File "/opt/lib/python3.12/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
    ...   File "/home/me/train.py", line 40 in train
    ... ''')
    'all_reduce at train.py:40'
    """
    return _where(text)[1]


def summary(stacks: Mapping[int, str]) -> str:
    """Return at which lines of code the ranks are, as one line of text.

    >>> summary({0: "it has ended", 1: "no answer within 5 s", 2: "it has ended"})
    'ranks 0, 2: it has ended; rank 1: no answer within 5 s'
    """
    places = {rank: "".join(_where(text)) for rank, text in stacks.items()}
    return "; ".join(f"{who(ranks)}{place}" for place, ranks in _groups(places).items())


def trim(text: str) -> str:
    """Return a rank's stacks without the main thread's frames that start the rank, unless there are no others."""
    blocks = _blocks(text)
    threads = [_thread(block) for block in blocks[1:]]
    main = main_thread(threads)
    kept = _inside(main.frames) if main else ()
    if main is None or not kept or len(kept) == len(main.frames):
        return text
    number = next(number for number, thread in enumerate(threads, start=1) if thread is main)
    lines = blocks[number].split("\n")
    first = [index for index, line in enumerate(lines) if _FRAME.fullmatch(line)][len(kept)]
    blocks[number] = "\n".join([*lines[:first], *(line for line in lines[first:] if not line.startswith("  "))])
    return "".join(blocks)


def is_library(path: str) -> bool:
    """Return whether a file belongs to Python, an installed package or the code that starts ranks, not to the user."""
    return bool(_LIBRARY.search(path))


def _blocks(text: str) -> list[str]:
    """Split the text into the part before the first thread, and one part for each thread."""
    starts = [header.start() for header in _HEADER.finditer(text)]
    return [text[start:end] for start, end in zip([0, *starts], [*starts, len(text)])]


def _thread(block: str) -> Thread:
    matches = [frame for line in block.split("\n") if (frame := _FRAME.fullmatch(line))]
    frames = tuple(Frame(frame[1] or frame[2] or "???", int(frame[3] or 0), frame[4]) for frame in matches)
    return Thread(not block.startswith("Thread"), frames)


def _inside(frames: Sequence[Frame]) -> Sequence[Frame]:
    """Return the frames without those that start a rank: the launcher's fork, and the code that loads user code."""
    end = next((index for index, frame in enumerate(frames) if _RANK.search(frame.file)), None)
    while end and _STARTER.search(frames[end - 1].file):
        end -= 1
    return frames[:end]


def _where(text: str) -> tuple[str, str]:
    """Return what a summary says after ``rank 3``: ``" in "`` and a line of code, or ``": "`` and why none is known."""
    threads = parse(text)
    main = main_thread(threads)
    if main is None:
        return ": ", " ".join(text.split()) or "no answer"
    if not main.current and text.rstrip().endswith("\n..."):  # Python lists 100 threads at most, the main one last
        return ": ", "too many threads to list the main thread"
    if not main.frames:
        return ": ", "no Python frame"
    if main.frames[0].function == "_shutdown" and main.frames[0].file.endswith("/threading.py"):
        others = (thread.frames for thread in threads if thread is not main)
        places = [_place(frames) for frames in others if not all(is_library(frame.file) for frame in frames)]
        if places:
            return ": ", f"the training code has ended, but a thread is still in {', '.join(dict.fromkeys(places))}"
    return " in ", _place(_inside(main.frames) or main.frames[:1])


def _place(frames: Sequence[Frame]) -> str:
    """Return the function that user code has called, and the line of user code that called it."""
    users = [index for index, frame in enumerate(frames) if not is_library(frame.file)]
    index = min(users, key=lambda index: bool(_NO_FILE.match(frames[index].file)), default=0)
    called = [frame.function for frame in frames[:index] if frame.function not in _WRAPPERS]
    name = called[-1] if called else frames[index].function
    if any("/torch/utils/data/" in frame.file for frame in frames[:index]):
        name = "DataLoader"
    return f"{name} at {frames[index].file.rpartition('/')[2]}:{frames[index].line}"


def _groups(texts: Mapping[int, str]) -> dict[str, list[int]]:
    """Group ranks by text, the group with the lowest rank first."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(texts):
        groups.setdefault(texts[rank], []).append(rank)
    return groups
