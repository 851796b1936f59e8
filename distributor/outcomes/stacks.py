"""What ranks are doing, from the text that ``faulthandler`` writes in each of them.

Pure functions of text, standard library only. Whatever the text is, none of them raises: a rank may have said why it
cannot answer, or its text may be cut off.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile

from distributor.text.wording import who

#: The line before the frames of a thread; free-threaded Python writes that of one thread only, as "Stack".
_HEADER = re.compile(r"^(?:(?:Current thread|Thread) .*|Stack )\(most recent call first\):$", re.MULTILINE)
#: A frame; one of a notebook's cell is named as the notebook has it, where the driver has looked that up.
_FRAME = re.compile(r'  (?:File (?:"(.*)"|\?\?\?)|(Cell In\[\d+\])), line (?:([0-9]{1,9})|\?\?\?) in (.*)')

#: Memory addresses, which differ between ranks that do the same.
_ADDRESS = re.compile(r"\b0x[0-9a-f]+")

_RANK = re.compile(r"(^|/)distributor/rank/process\.py$")
#: Between a rank's frames and the user's.
_STARTER = re.compile(r"(^|/)distributor/shipping/payload\.py$|^<frozen runpy>$|/lib(64)?/python[^/]*/runpy\.py$")
_LIBRARY = re.compile(
    r"/lib(64)?/python\d[^/]*/|/(site|dist)-packages/|^<frozen .*>$"
    r"|(^|/)distributor/(node/launcher|shipping/payload|rank/process)\.py$|/package\.zip/distributor/"
)
#: Code without a file: generated, or typed in.
_NO_FILE = re.compile(r"<.*>$")

#: Functions around the one that was called: torch's and contextlib's decorators, ``Module.__call__``.
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
    """One call on a stack; ``line`` is 0 and ``file`` is ``"???"`` where Python does not know them.

    ``file`` is ``"Cell In[2]"`` for a cell of the driver's notebook.
    """

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Thread:
    """A thread of a rank.

    Attributes:
        current: whether it is the one that answered.
        frames: innermost first; none where no Python code runs. Python lists 100 at most.
    """

    current: bool
    frames: tuple[Frame, ...]


class Stacks(dict[int, str]):
    """The stacks of ranks' threads: each rank's text, by rank.

    As a string, where ranks are in one line, then the texts: each once, without the launcher's frames.

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
    """The threads in faulthandler's text, as listed; none if it is another text.

    Args:
        text: what ``faulthandler.register(..., all_threads=True)`` writes on a signal.

    Example:
        >>> parse('Current thread 0x1 (most recent call first):\\n  File "/home/me/train.py", line 40 in train\\n')
        (Thread(current=True, frames=(Frame(file='/home/me/train.py', line=40, function='train'),)),)
    """
    return tuple(_thread(block) for block in _blocks(text)[1:])


def main_thread(threads: Sequence[Thread]) -> Thread | None:
    """The thread that answered: signals are the main thread's. If none says so, the oldest, which is listed last."""
    return next((thread for thread in threads if thread.current), threads[-1] if threads else None)


def where(text: str) -> str:
    """Where a rank is: what its main thread has called, and the line of the user's code that has called it.

    Args:
        text: of one rank. If it is not faulthandler's, it is the answer, in one line.

    Example:
        >>> where('''Current thread 0x00007f8d69c73b80 (most recent call first):
        ...   File "/opt/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", line 3195 in all_reduce
        ...   File "/opt/lib/python3.12/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
        ...   File "/home/me/train.py", line 40 in train
        ... ''')
        'all_reduce at train.py:40'
    """
    return _where(text)[1]


def summary(stacks: Mapping[int, str]) -> str:
    """Where ranks are, in one line.

    Args:
        stacks: their texts, by rank.

    Example:
        >>> summary({0: "it has ended", 1: "no answer within 5 s", 2: "it has ended"})
        'ranks 0, 2: it has ended; rank 1: no answer within 5 s'
    """
    places = {rank: "".join(_where(text)) for rank, text in stacks.items()}
    return "; ".join(f"{who(ranks)}{place}" for place, ranks in _groups(places).items())


def trim(text: str) -> str:
    """The text without the frames that start a rank, outside of the user's code in the main thread.

    It stays as it is where nothing would be left of that thread.
    """
    blocks = _blocks(text)
    threads = [_thread(block) for block in blocks[1:]]
    main = main_thread(threads)
    kept = _inside(main.frames) if main else ()
    if main is None or not kept or len(kept) == len(main.frames):
        return text
    number = next(number for number, thread in enumerate(threads, start=1) if thread is main)
    lines = blocks[number].split("\n")
    first = [index for index, line in enumerate(lines) if _FRAME.fullmatch(line)][len(kept)]
    blocks[number] = "\n".join([*lines[:first], *dropwhile(lambda line: line.startswith("  "), lines[first:])])
    return "".join(blocks)


def is_library(path: str) -> bool:
    """Whether a frame's file is of Python, of an installed package or of the launcher, and not the user's."""
    return bool(_LIBRARY.search(path))


def _blocks(text: str) -> list[str]:
    """The text in pieces: what comes before the first thread, then one for each thread."""
    starts = [header.start() for header in _HEADER.finditer(text)]
    return [text[start:end] for start, end in zip([0, *starts], [*starts, len(text)])]


def _thread(block: str) -> Thread:
    found = [frame for line in block.split("\n") if (frame := _FRAME.fullmatch(line))]
    frames = tuple(Frame(frame[1] or frame[2] or "???", int(frame[3] or 0), frame[4]) for frame in found)
    return Thread(not block.startswith("Thread"), frames)


def _inside(frames: Sequence[Frame]) -> Sequence[Frame]:
    """The frames without those that start a rank: the fork of the launcher, and what loads the user's code."""
    end = next((index for index, frame in enumerate(frames) if _RANK.search(frame.file)), None)
    while end and _STARTER.search(frames[end - 1].file):
        end -= 1
    return frames[:end]


def _where(text: str) -> tuple[str, str]:
    """Where a rank is, after ``" in "``, or why that is not known, after ``": "``."""
    main = main_thread(parse(text))
    if main is None:
        return ": ", " ".join(text.split()) or "no answer"
    if not main.current and text.rstrip().endswith("\n..."):  # Python lists 100 threads, the oldest last
        return ": ", "too many threads to list the main one"
    if not main.frames:
        return ": ", "no Python frame"
    frames = _inside(main.frames) or main.frames[:1]
    users = [index for index, frame in enumerate(frames) if not is_library(frame.file)]
    index = min(users, key=lambda index: bool(_NO_FILE.match(frames[index].file)), default=0)
    called = [frame.function for frame in frames[:index] if frame.function not in _WRAPPERS]
    name = called[-1] if called else frames[index].function
    if any("/torch/utils/data/" in frame.file for frame in frames[:index]):
        name = "DataLoader"
    return " in ", f"{name} at {frames[index].file.rpartition('/')[2]}:{frames[index].line}"


def _groups(texts: Mapping[int, str]) -> dict[str, list[int]]:
    """The ranks of each distinct text, in order of the lowest rank."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(texts):
        groups.setdefault(texts[rank], []).append(rank)
    return groups
