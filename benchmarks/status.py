"""Draw the picture of a terminal during a run, from a real run in a real terminal, as an SVG file.

python benchmarks/status.py docs/status.svg
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import sys
import tempfile
from pathlib import Path

import pyte
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.style import Style
from rich.text import Text

COLUMNS, ROWS = 88, 30

#: A script that fits a line on four ranks. Each rank has its own noise, and all make the same steps.
TRAIN = """
import time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(1, 11):
    time.sleep(0.3)
    for _ in range(20):
        x = torch.randn(64, 1)
        loss = (model(x) - 3 * x - 1 - 0.2 * torch.randn(64, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}  loss {loss.item():.4f}", flush=True)
"""

COMMAND = "distributor run --num-processes 4 --local --no-gpu train.py"


def record(wanted: str) -> pyte.Screen:
    """Return the screen at the first moment when it shows the wanted text."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(TRAIN)
        pid, terminal = pty.fork()
        if pid == 0:
            os.chdir(folder)
            words = [sys.executable, "-m", "distributor", *COMMAND.split()[1:]]
            os.execve(words[0], words, {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"})
        seen = None
        try:
            while data := os.read(terminal, 1 << 16):
                stream.feed(data)
                text = "\n".join(screen.display)
                if seen is None and re.search(wanted, text):
                    seen = {row: dict(line) for row, line in screen.buffer.items()}
        except OSError:  # the command has ended
            pass
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code or seen is None:
            sys.exit(f"the command ended with {code}, and {'' if seen else 'never '}showed {wanted!r}")
    screen.buffer.clear()
    for row, line in seen.items():
        screen.buffer[row].update(line)
    return screen


def drawn(screen: pyte.Screen) -> Text:
    """Return the lines of the screen with their colours."""
    names = {"brown": "yellow", "default": None}
    lines = [Text.assemble(("$ ", "bold"), COMMAND)]
    for row in range(ROWS):
        line = Text()
        for column in range(COLUMNS):
            cell = screen.buffer[row][column]
            style = Style(color=names.get(cell.fg, cell.fg.replace("bright", "bright_")), bold=cell.bold)
            line.append(cell.data, style)
        line.rstrip()
        lines.append(line)
    while not lines[-1].plain:
        lines.pop()
    return Text("\n").join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("svg", type=Path)
    options = parser.parse_args()
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)
    console.print(drawn(record(r"running: 4 of 4(.|\n)*ranks? .*epoch 4")))
    # Without the fonts that Rich would fetch: the browser shows the picture with its own monospace font.
    own_fonts = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    options.svg.write_text(
        console.export_svg(title="distributor", code_format=own_fonts.replace("Fira Code", "monospace"))
    )
    print(f"{options.svg}: {options.svg.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
