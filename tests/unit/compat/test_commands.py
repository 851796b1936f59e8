"""Which command lines of Azure's jobs are run, and which are refused."""

from __future__ import annotations

import pytest

from distributor import ConfigurationError
from distributor.compat.commands import Program, parse


@pytest.mark.parametrize(
    ("line", "program"),
    [
        ("python train.py", Program("train.py")),
        ("python3 -u train.py --lr 0.1", Program("train.py", ("--lr", "0.1"))),
        ("python -m pkg.train 'two words'", Program("pkg.train", ("two words",), is_module=True)),
        ("python train.py \\\n  --n 1 \\\n  --m 2\n    ", Program("train.py", ("--n", "1", "--m", "2"))),
        ("python train.py --sep ';' --or \"a|b\" \\&", Program("train.py", ("--sep", ";", "--or", "a|b", "&"))),
        ("python train.py '{\n}' '$1'", Program("train.py", ("{\n}", "$1"))),
        ("python train.py ${{ inputs.data }}/a --n=${{inputs.n}}", Program("train.py", ("/my data/a", "--n=3"))),
    ],
)
def test_commands_that_are_run(line: str, program: Program) -> None:
    class Input:
        path = "/my data"

    assert parse(line, {"data": Input(), "n": 3}) == program


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("", "command must be a line such as"),
        ("python a.py && python b.py", "command uses '&', which only a shell"),
        ("python a.py > log", "command uses '>'"),
        ("python a.py $HOME", r"command uses '\$'"),
        ('python a.py "$HOME;"', r"command uses '\$'"),
        (
            "python a.py ${{outputs.model}}",
            r"names the output 'model', .*: write a path instead of \$\{\{outputs.model",
        ),
        ("python a.py\npython b.py", r"command uses '\\n'"),
        ("python a.py 'b", "command cannot be split into words"),
        ("torchrun --nproc_per_node 2 a.py", "leave out torchrun, mpirun and other launchers"),
        ("python", "command must be 'python SCRIPT"),
        ("python -m", "command must be 'python SCRIPT"),
        ("python -O a.py", "passes the option '-O' to Python"),
        ("python a.py ${{inputs.lr}}", "names the input 'lr', but inputs has data: add the input to inputs"),
    ],
)
def test_commands_that_are_refused(line: str, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        parse(line, {"data": "/data"})
