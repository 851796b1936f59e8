"""Each option is declared once: signature, docstring and command line agree with the declarations."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import trainings

from distributor import ConfigurationError, DeepspeedTorchDistributor, Distributor, TorchDistributor
from distributor.api.parameters import GROUPS, OPTIONS, Options
from distributor.cli import command
from distributor.data.source import Data
from distributor.launch import DeepSpeed, Torchrun
from distributor.values.options import PANELS, Option

WHERE = "see 'An option' in docs/contributing.md"
SIGNATURE = {
    name: parameter for name, parameter in inspect.signature(Distributor.__init__).parameters.items() if name != "self"
}


def documented() -> list[str]:
    """The names in the section Args of the docstring."""
    section = inspect.getdoc(Distributor).partition("\nArgs:\n")[2].partition("\nRaises:\n")[0]  # type: ignore[union-attr]
    return re.findall(r"^    (\w+): ", section, re.MULTILINE)


def on_command_line() -> dict[str, Any]:
    return {parameter.name: parameter for parameter in command.run.params}


def differences(
    declared: Mapping[str, Option], signature: Mapping[str, inspect.Parameter], documented: list[str], given: Any
) -> list[str]:
    """What does not agree, each with the place where it is to be added or removed."""
    told = []
    for name in sorted({*declared, *signature, *documented}):
        if name not in declared:
            told.append(f"{name} is not declared: add it to a group in values/options.py, or in api/parameters.py")
            continue
        if name not in signature:
            told.append(f"{name} is no argument: add it to Distributor.__init__ in api/distributor.py")
        elif signature[name].default != declared[name].default:
            told.append(
                f"{name} has the default {signature[name].default!r} in Distributor.__init__ and "
                f"{declared[name].default!r} in its declaration"
            )
        if name not in documented:
            told.append(f"{name} is not explained: add it to Args in the docstring of Distributor, api/distributor.py")
        if declared[name].flag is not None and name not in given:
            told.append(f"{name} is no option of distributor run: cli/flags.py leaves its declaration out")
    return told


def test_signature_docstring_and_command_line_agree_with_the_declarations() -> None:
    told = differences(OPTIONS, SIGNATURE, documented(), on_command_line())
    assert not told, "\n".join([*told, WHERE])


def test_a_missing_declaration_is_named_with_its_place() -> None:
    new = Option(1, lambda name, value: value, "New.")
    parameter = SIGNATURE["name"].replace(name="new", default=1)

    def told(declared: Any = OPTIONS, signature: Any = SIGNATURE, names: Any = ()) -> list[str]:
        return differences(declared, signature, [*documented(), *names], on_command_line())

    assert told(names=["new"]) == [
        "new is not declared: add it to a group in values/options.py, or in api/parameters.py"
    ]
    assert told({**OPTIONS, "new": new}) == [
        "new is no argument: add it to Distributor.__init__ in api/distributor.py",
        "new is not explained: add it to Args in the docstring of Distributor, api/distributor.py",
    ]
    assert told({**OPTIONS, "new": new}, {**SIGNATURE, "new": parameter.replace(default=2)}, ["new"]) == [
        "new has the default 2 in Distributor.__init__ and 1 in its declaration"
    ]
    given = {name: parameter for name, parameter in on_command_line().items() if name != "logs"}
    assert differences(OPTIONS, SIGNATURE, documented(), given) == [
        "logs is no option of distributor run: cli/flags.py leaves its declaration out"
    ]


def test_arguments_are_explained_in_the_order_of_the_signature() -> None:
    assert documented() == list(SIGNATURE)


def test_arguments_after_pysparks_are_keywords_with_types() -> None:
    kinds = {name: parameter.kind for name, parameter in SIGNATURE.items()}
    positional = [name for name, kind in kinds.items() if kind is not inspect.Parameter.KEYWORD_ONLY]
    assert positional == ["num_processes", "local_mode", "use_gpu"]
    assert all(parameter.annotation is not inspect.Parameter.empty for parameter in SIGNATURE.values())


@pytest.mark.parametrize("name", OPTIONS)
def test_a_declaration_is_complete(name: str) -> None:
    declaration = OPTIONS[name]
    declaration.check(name, declaration.default)
    assert re.fullmatch(r"[A-Z].*[^.].", declaration.help), f"the help of {name} is no sentence: {declaration.help!r}"
    assert declaration.help.count(". ") == 0, f"the help of {name} is more than one sentence"
    if declaration.flag is not None:
        assert declaration.flag.panel in PANELS
        assert on_command_line()[name].help == declaration.help


def test_no_option_is_declared_twice() -> None:
    assert sum(len(kind.__dataclass_fields__) for kind in GROUPS.values()) == len(OPTIONS)  # type: ignore[attr-defined]


NAMED_CALLBACK = SimpleNamespace(on_end=print)

#: A value of each option that is not its default.
GIVEN: dict[str, Any] = {
    "num_processes": 4,
    "local_mode": True,
    "use_gpu": False,
    "launch": "deepspeed",
    "name": "digits",
    "env": {"A": "1"},
    "forward_env": ("W_*",),
    "working_dir": "project",
    "working_dir_limit": 2 << 20,
    "output_dir": "s3://bucket/run",
    "output_limit": 1 << 20,
    "gpus_per_process": None,  # only with GPUs
    "cpus_per_process": 2,
    "memory_per_process": 1 << 30,
    "max_processes_per_node": 2,
    "start_timeout": 1.0,
    "grace_period": 2.0,
    "heartbeat_timeout": 3.0,
    "stall_timeout": 4.0,
    "logs": (0, 3),
    "fold_logs": True,
    "log_prefix": False,
    "log_escapes": True,
    "log_dir": "logs",
    "progress": False,
    "driver_ports": (4700, 4710),
    "keep_warm": 5.0,
    "preload": ("json",),
    "start_method": "fork",  # as the warm process needs
    "local_ranks": "host",
    "require_group": True,
    "max_restarts": 3,
    "restart_on": "any",
    "resume": "never",
    "checkpoints": "saved",
    "callbacks": (NAMED_CALLBACK,),
    "data": {"train": Data(None)},
}


def test_the_constructor_hands_every_argument_to_its_group() -> None:
    assert GIVEN.keys() == OPTIONS.keys(), f"add the new option to GIVEN here; {WHERE}"
    assert Distributor(**GIVEN)._options == Options.of(**GIVEN)
    options = Options.of(**GIVEN)
    same = {"gpus_per_process", "start_method"}
    for group, kind in GROUPS.items():
        for name, field in kind.__dataclass_fields__.items():  # type: ignore[attr-defined]
            assert (getattr(getattr(options, group), name) != field.default) == (name not in same), name


def test_an_argument_that_no_group_declares_is_an_error() -> None:
    with pytest.raises(
        TypeError, match="unknown options: colour, size. Declare each in values/options.py or api/parameters.py"
    ):
        Options.of(size=1, colour=2)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "resume='must' needs name= and checkpoints=, but name= and checkpoints= are not given"),
        ({"name": "gpt"}, "resume='must' needs name= and checkpoints=, but checkpoints= is not given"),
        ({"checkpoints": "saved"}, "resume='must' needs name= and checkpoints=, but name= is not given"),
    ],
)
def test_resume_needs_a_name_and_checkpoints(given: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        Options.of(resume="must", **given)


def test_options_of_two_groups_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(
        ConfigurationError, match="the option 'logs' contains rank 2, but with num_processes=2, ranks go from 0 to 1"
    ):
        Options.of(num_processes=2, logs=[0, 2])
    with pytest.raises(
        ConfigurationError, match="the option 'logs' contains rank -1, but with num_processes=2, ranks go from 0 to 1"
    ):
        Options.of(num_processes=2, logs=[-1])


@pytest.mark.parametrize(
    ("kind", "name", "meant"),
    [
        (Distributor, "max_restart", "max_restarts"),
        (Distributor, "log", "logs"),
        (Distributor, "localMode", "local_mode"),
        (Distributor, "useGpu", "use_gpu"),
        (TorchDistributor, "numProcesses", "num_processes"),
        (DeepspeedTorchDistributor, "deepspeed_config", "deepspeedConfig"),
        (DeepspeedTorchDistributor, "localmode", "localMode"),
        (DeepspeedTorchDistributor, "max_restart", "max_restarts"),
        (DeepspeedTorchDistributor, "numGPUs", "numGpus"),
    ],
)
def test_a_misspelt_option_is_answered_with_the_one_that_was_meant(kind: Any, name: str, meant: str) -> None:
    with pytest.raises(TypeError, match=rf"^there is no option {name!r}: did you mean {meant!r}\?$"):
        kind(**{name: 1})


def test_an_option_that_resembles_none_is_refused_without_a_guess() -> None:
    with pytest.raises(TypeError, match="^there is no option 'zzz'$"):
        Distributor(zzz=1)  # type: ignore[call-arg]


def planned(launch: Any) -> Any:
    return Distributor(2, local_mode=True, use_gpu=False, launch=launch).plan(trainings.rank)


@pytest.mark.parametrize("launch", ["slurm", "", None, 3, DeepSpeed, Torchrun])
def test_other_values_are_no_launch_paths(launch: Any) -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"launch must be 'torchrun' or .* or 'tensorflow' or a launch path such as distributor.launch.D",
    ) as caught:
        planned(launch)
    assert str(caught.value).endswith(f"not {launch!r}")
