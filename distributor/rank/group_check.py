"""Detects a rank that trains without the other ranks because it never joins a process group of all ranks.

Nothing fails then: each rank trains a model of its own. Hooks at optimizer steps and at the first backward pass note
that the rank trains, and whether it is in a process group of all ranks at that moment.
"""

from __future__ import annotations

import sys
from typing import Any

from distributor.machine.imports import on_import

# Frameworks that create process groups, the most specific first; the first that is loaded decides the advice.
_FRAMEWORKS = ("pytorch_lightning", "lightning", "lightning_fabric", "transformers", "accelerate")


class GroupCheck:
    """Whether this rank trains, and whether it trains together with all others."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._trains = False
        self._met = world_size == 1
        self._elsewhere = False  # whether the rank has trained in a group of another size
        self._handle: Any = None

    def watch(self) -> None:
        """Observe this process's training steps from now on. torch need not be imported yet."""
        if not self._met:
            on_import("torch.optim.optimizer", self._watch_steps)
            on_import("torch.autograd", self._watch_backward)

    @property
    def missed(self) -> str | None:
        """The framework with which this rank trains alone, else ``"torch"``; ``None`` if it does not train alone."""
        if not self._trains or self._met:
            return None
        size = self._group_size()
        if size == self._world_size or (size is None and not self._elsewhere and self._was_in_group()):
            return None
        return next((name for name in _FRAMEWORKS if name in sys.modules), "torch")

    def _watch_steps(self, optimizer: Any) -> None:
        self._handle = optimizer.register_optimizer_step_post_hook(lambda *_: self._note())

    def _watch_backward(self, autograd: Any) -> None:
        backward = autograd.backward

        def first_backward(*args: Any, **kwargs: Any) -> Any:
            if autograd.backward is first_backward:
                autograd.backward = backward
            self._note()
            if self._met and self._handle is not None:
                self._handle.remove()  # not in the hook, since torch then iterates over the hooks
            return backward(*args, **kwargs)

        autograd.backward = first_backward

    def _note(self) -> None:
        """Record that this rank trains; nothing more once a group has included all ranks."""
        if self._met:
            return
        self._trains = True
        size = self._group_size()
        self._met = size == self._world_size or self._has_rpc()
        self._elsewhere = self._elsewhere or size not in (None, self._world_size)

    @staticmethod
    def _group_size() -> int | None:
        distributed: Any = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return None
        return int(distributed.get_world_size())

    @staticmethod
    def _has_rpc() -> bool:
        """Whether this process is one of RPC's, which trains with others in its own way."""
        api = sys.modules.get("torch.distributed.rpc.api")
        is_set = getattr(api, "_is_current_rpc_agent_set", lambda: False)
        return bool(is_set())

    @staticmethod
    def _was_in_group() -> bool:
        """Tell whether a group was destroyed: the exception hook that ``init_process_group`` sets stays."""
        return getattr(sys.excepthook, "__name__", "") == "_distributed_excepthook"
