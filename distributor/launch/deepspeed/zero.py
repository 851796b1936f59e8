"""ZeRO: a complete configuration for each stage, and estimates of the memory that a model needs. Imports no torch.

Sources: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv:1910.02054;
https://deepspeed.readthedocs.io/en/latest/memory.html for the estimates.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from distributor.errors import ConfigurationError
from distributor.launch.deepspeed.config import ACCUMULATION, AUTO, MICRO, STAGES, TRAIN, is_stage
from distributor.launch.deepspeed.reading import Config
from distributor.text.tables import table
from distributor.values.checks import check_count, check_memory, one_of

Offload = Literal["none", "cpu", "nvme"]

_COMMENTS = {
    TRAIN: "samples per optimizer step, over all ranks: micro batch x accumulation x ranks",
    MICRO: "samples per rank and forward pass: they must fit into a GPU's memory",
    ACCUMULATION: "forward passes per optimizer step",
    "gradient_clipping": "largest norm of the gradients; DeepSpeed clips to 1.0 by default, 0 turns clipping off",
    "optimizer.type": "AdamW: DeepSpeed's fused version on GPUs, its CPU version if the optimizer is offloaded",
    "optimizer.params.lr": "learning rate",
    "optimizer.params.torch_adam": "true: torch's own, which needs no compiler",
    "zero_allow_untested_optimizer": "lets ZeRO work with optimizers that DeepSpeed has not tested",
    "bf16.enabled": "weights, gradients and activations in bfloat16, with a master copy of the weights in fp32",
    "fp16.enabled": "weights, gradients and activations in float16, with a loss scale that adapts itself",
    "fp16.loss_scale": "0: the loss scale adapts itself",
    "fp16.initial_scale_power": "the initial loss scale is 2 to this power",
    "zero_optimization.stage": "what is split among ranks: 1 optimizer states, 2 + gradients, 3 + parameters",
    "zero_optimization.overlap_comm": "reduces gradients during the backward pass",
    "zero_optimization.contiguous_gradients": "copies gradients into one buffer, so that memory is not fragmented",
    "zero_optimization.reduce_bucket_size": "elements reduced at a time: more is faster and takes more memory",
    "zero_optimization.allgather_bucket_size": "elements gathered at a time: more is faster and takes more memory",
    "zero_optimization.stage3_prefetch_bucket_size": "elements fetched before they are needed",
    "zero_optimization.stage3_param_persistence_threshold": "smaller parameters stay whole on every rank",
    "zero_optimization.stage3_max_live_parameters": "parameters that may be whole on a rank at one time",
    "zero_optimization.stage3_max_reuse_distance": "a parameter needed again within this many parameters stays whole",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "true: save_16bit_model writes the whole model",
    "zero_optimization.offload_optimizer.device": "where optimizer states are kept; the CPU updates them",
    "zero_optimization.offload_param.device": "where parameters are kept between uses",
    "zero_optimization.offload_optimizer.nvme_path": "a folder on a fast disk of each node",
    "zero_optimization.offload_param.nvme_path": "a folder on a fast disk of each node",
    "zero_optimization.offload_optimizer.pin_memory": "page-locked memory: faster copies, cannot be swapped out",
    "zero_optimization.offload_param.pin_memory": "page-locked memory: faster copies, cannot be swapped out",
}


class CommentedConfig(dict[str, Any]):
    """A DeepSpeed configuration: an ordinary dict, but ``str()`` shows it as JSON with comments on its values.

    DeepSpeed can read the text that ``str()`` returns, including the comments.
    """

    def __str__(self) -> str:
        return "\n".join(_lines(self, "", 0))


def zero(
    stage: Literal[0, 1, 2, 3] = 2,
    offload: Offload = "none",
    precision: Literal["bf16", "fp16", "fp32"] = "bf16",
    *,
    micro_batch_size: int | Literal["auto"] = "auto",
    gradient_accumulation_steps: int | Literal["auto"] = "auto",
    learning_rate: float | Literal["auto"] = "auto",
    gradient_clipping: float = 1.0,
    nvme_path: str | None = None,
    torch_adam: bool = False,
) -> CommentedConfig:
    """Return a complete DeepSpeed configuration for a ZeRO stage.

    Args:
        stage: what is split among ranks: 0 for nothing, 1 for optimizer states, 2 for gradients as well, 3 for
            parameters as well.
        offload: where optimizer states (and, with stage 3, parameters) are kept. ``"cpu"`` (the host's memory) needs
            stage 1 or more; ``"nvme"`` (a disk) needs stage 3.
        precision: format of weights and gradients in computations.
        micro_batch_size: samples per rank and forward pass.
        gradient_accumulation_steps: forward passes per optimizer step.
        learning_rate: learning rate of AdamW.
        gradient_clipping: largest norm of the gradients; 0 sets no limit.
        nvme_path: a folder on a fast disk of each node, for ``offload="nvme"``.
        torch_adam: whether to use torch's AdamW, which needs no compiler on executors but is slow when offloaded.

    Returns:
        A dict for ``deepspeedConfig=``. ``print`` shows it with comments that explain its values.

    Raises:
        ConfigurationError: a value is wrong, or the stage does not allow it.

    Example:
        >>> zero(3, micro_batch_size=4)["zero_optimization"]["stage"]
        3
    """
    _check_zero(stage, offload, precision, nvme_path)
    for name, size in (
        ("micro_batch_size", micro_batch_size),
        ("gradient_accumulation_steps", gradient_accumulation_steps),
    ):
        if size != AUTO:
            check_count(name, size)
    optimizer: Config = {"lr": learning_rate, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
    if torch_adam:
        optimizer["torch_adam"] = True
    config = CommentedConfig(
        {
            TRAIN: AUTO,
            MICRO: micro_batch_size,
            ACCUMULATION: gradient_accumulation_steps,
            "gradient_clipping": gradient_clipping,
            "optimizer": {"type": "AdamW", "params": optimizer},
        }
    )
    if precision == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}
    elif precision == "bf16":
        config["bf16"] = {"enabled": True}
    config["zero_optimization"] = _zero_section(stage, offload, nvme_path)
    return config


def _check_zero(stage: int, offload: str, precision: str, nvme_path: str | None) -> None:
    if not is_stage(stage):
        raise ConfigurationError(f"stage must be 0, 1, 2 or 3, not {stage!r}")
    one_of("none", "cpu", "nvme")("offload", offload)
    one_of("bf16", "fp16", "fp32")("precision", precision)
    needed = {"none": 0, "cpu": 1, "nvme": 3}[offload]
    if stage < needed:
        raise ConfigurationError(
            f"offload={offload!r} needs stage {needed}{' or more' if needed == 1 else ''}, not {stage}"
        )
    if offload == "nvme" and not nvme_path:
        raise ConfigurationError("offload='nvme' needs nvme_path, a folder on a fast disk of each node")


def _zero_section(stage: int, offload: Offload, nvme_path: str | None) -> Config:
    section: Config = {"stage": stage}
    if stage:
        section |= {"overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": AUTO}
    if stage in (1, 2):
        section["allgather_bucket_size"] = AUTO
    if stage == 3:
        section |= {
            "stage3_prefetch_bucket_size": AUTO,
            "stage3_param_persistence_threshold": AUTO,
            "stage3_max_live_parameters": 1_000_000_000,
            "stage3_max_reuse_distance": 1_000_000_000,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    if offload != "none":
        place: Config = {"device": offload, "pin_memory": True}
        if offload == "nvme":
            place["nvme_path"] = nvme_path
        section["offload_optimizer"] = dict(place)
        if stage == 3:
            section["offload_param"] = dict(place)
    return section


def _lines(value: Mapping[str, Any], path: str, depth: int, end: str = "") -> Iterator[str]:
    yield "  " * depth + ("{" if not path else f'"{path.rpartition(".")[2]}": {{')
    for index, (name, inner) in enumerate(value.items(), start=1):
        here, comma = f"{path}.{name}" if path else name, "," if index < len(value) else ""
        if isinstance(inner, Mapping):
            yield from _lines(inner, here, depth + 1, comma)
        else:
            comment = f"  // {_COMMENTS[here]}" if here in _COMMENTS else ""
            yield f"{'  ' * (depth + 1)}{json.dumps(name)}: {json.dumps(inner)}{comma}{comment}"
    yield "  " * depth + "}" + end


@dataclass(frozen=True)
class Estimate:
    """The memory that a ZeRO stage needs for parameters, gradients and optimizer states, without activations.

    Attributes:
        stage: ZeRO stage.
        offload: where optimizer states (and, with stage 3, parameters) are kept.
        gpu_bytes: bytes needed in each GPU's memory.
        host_bytes: bytes needed in each node's memory, for all its ranks together.
        fits: whether each GPU and each node has that much memory, with a part of each GPU's memory left for activations
            (``activation_share`` of :func:`suggest_zero`); ``None`` if the GPU memory is not known.
    """

    stage: int
    offload: Literal["none", "cpu"]
    gpu_bytes: int
    host_bytes: int
    fits: bool | None = None


@dataclass(frozen=True)
class Suggestion:
    """The result of :func:`suggest_zero`; ``print`` it for a table.

    Attributes:
        parameters: number of parameters of the model.
        estimates: one for each stage without offload, and one each for stages 2 and 3 with offload to the CPU. The
            quickest comes first, and the one that needs the least GPU memory comes last.
        best: the first estimate that fits; ``None`` if no estimate fits, or the GPU memory is not known.
    """

    parameters: int
    estimates: tuple[Estimate, ...]
    best: Estimate | None

    def config(self, **options: Any) -> CommentedConfig:
        """Return the configuration that :func:`zero` makes for the suggested stage and offload.

        Args:
            options: further arguments of :func:`zero`.

        Raises:
            ConfigurationError: no stage is suggested, because none fits, or because the GPU memory is not known; or an
                option is wrong.
        """
        if self.best is None:
            raise ConfigurationError(
                "no stage is known to fit: pass gpu_memory='80g' to suggest_zero if it was left out; otherwise use "
                "more GPUs, or make a configuration with zero(3, offload='nvme', nvme_path=...)"
            )
        return zero(self.best.stage, self.best.offload, **options)  # type: ignore[arg-type]

    def __str__(self) -> str:
        rows = [
            [
                f"{estimate.stage}  {STAGES[estimate.stage]}",
                estimate.offload,
                _size(estimate.gpu_bytes),
                _size(estimate.host_bytes),
                {None: "", True: "yes", False: "no"}[estimate.fits] + (" <- best" if estimate is self.best else ""),
            ]
            for estimate in self.estimates
        ]
        if self.best is not None:
            hint = ""
        elif self.estimates[0].fits is None:
            hint = "\nto see which stages fit, pass gpu_memory='80g'"
        else:
            hint = "\nnone fits: use more GPUs or nodes, or zero(3, offload='nvme', nvme_path=...)"
        head = ["ZeRO stage", "offload", "per GPU", "per host", "fits"]
        return f"{self.parameters:,} parameters, Adam, mixed precision; without activations\n{table(head, rows)}{hint}"


def suggest_zero(
    model_or_parameter_count: Any,
    *,
    num_gpus_per_node: int = 1,
    nnodes: int = 1,
    gpu_memory: int | str | None = None,
    host_memory: int | str | None = None,
    largest_layer_parameters: int | None = None,
    activation_share: float = 0.3,
) -> Suggestion:
    """Estimate the GPU and host memory that each ZeRO stage needs, and suggest the quickest stage that fits.

    The formulas are the same as in DeepSpeed's ``estimate_zero2_model_states_mem_needs`` and ``estimate_zero3_...``,
    for Adam and mixed precision. DeepSpeed has no formula for stages 0 and 1. For these stages, the estimates add up
    the same numbers of bytes for parameters, gradients and optimizer states. Every rank is assumed to build the whole
    model first, except with stage 3, where the model is built within ``zero.Init``. For stage 2 with an offloaded
    optimizer, DeepSpeed's formula makes the host memory of each node grow with the total number of GPUs.

    One GB is 2**30 bytes. Stages that split less among ranks are quicker, and so are stages without offload.

    Args:
        model_or_parameter_count: a torch module (on any device, including "meta"), or its number of parameters.
        num_gpus_per_node: number of GPUs, and of ranks, per node.
        nnodes: number of nodes.
        gpu_memory: memory of each GPU, in bytes or as ``"80g"``. Without it, no stage is suggested.
        host_memory: memory of each node, in bytes or as ``"500g"``. Without it, every stage is assumed to fit into a
            node's memory.
        largest_layer_parameters: number of parameters of the largest layer, which stage 3 keeps whole. By default,
            it is read from the module; if only a number of parameters is given, 1/40 of it is assumed.
        activation_share: fraction of a GPU's memory to leave for activations and fragmentation.

    Raises:
        ConfigurationError: a value is wrong.

    Example:
        >>> print(suggest_zero(7_000_000_000, num_gpus_per_node=8, gpu_memory="80g"))
        7,000,000,000 parameters, Adam, mixed precision; without activations
        ZeRO stage           offload   per GPU  per host         fits
        0  none                 none  130.4 GB  312.9 GB           no
        1  optimizer states     none   39.1 GB  312.9 GB  yes <- best
        2  + gradients          none   27.7 GB  312.9 GB          yes
        3  + parameters         none   15.3 GB    7.8 GB          yes
        2  + gradients           cpu   13.0 GB  312.9 GB          yes
        3  + parameters          cpu    0.7 GB  176.0 GB          yes
    """
    parameters, largest = _count(model_or_parameter_count)
    if largest_layer_parameters is not None:
        largest = check_count("largest_layer_parameters", largest_layer_parameters)
    per_node, nodes = check_count("num_gpus_per_node", num_gpus_per_node), check_count("nnodes", nnodes)
    gpu = None if gpu_memory is None else check_memory("gpu_memory", gpu_memory)
    host = None if host_memory is None else check_memory("host_memory", host_memory)
    if not 0 <= activation_share < 1:
        raise ConfigurationError(f"activation_share must be at least 0 and less than 1, not {activation_share!r}")
    estimates = []
    for stage, offload in ((0, "none"), (1, "none"), (2, "none"), (3, "none"), (2, "cpu"), (3, "cpu")):
        gpu_bytes, host_bytes = estimate(parameters, largest, stage, offload == "cpu", per_node, nodes)
        fits = None
        if gpu is not None:
            fits = gpu_bytes <= gpu * (1 - activation_share) and (host is None or host_bytes <= host)
        estimates.append(Estimate(stage, "cpu" if offload == "cpu" else "none", gpu_bytes, host_bytes, fits))
    return Suggestion(
        parameters, tuple(estimates), next((candidate for candidate in estimates if candidate.fits), None)
    )


def estimate(
    parameters: int, largest: int, stage: int, offload: bool, num_gpus_per_node: int, nnodes: int
) -> tuple[int, int]:
    """Return the bytes that parameters, gradients and optimizer states need on each GPU, and on each host.

    Bytes per parameter: 2 for the parameter and 2 for its gradient in 16 bits; 4 each for its master copy, its gradient
    in fp32 and Adam's two moments. In the host's memory, everything counts 1.5 times, because of buffers.
    """
    gpus, buffers = num_gpus_per_node * nnodes, 1.5
    whole_on_each_rank = 4 * num_gpus_per_node * parameters * buffers  # while the model is built, before it is split
    if stage < 3 and not offload:
        whole, split = {0: (20, 0), 1: (4, 16), 2: (2, 18)}[stage]
        return int(whole * parameters + split * parameters / gpus), int(whole_on_each_rank)
    if stage < 3:
        return 2 * parameters, int(parameters * max(4 * gpus, 16) * buffers)
    layer = 4 * largest
    if not offload:
        return int(layer + 18 * parameters / gpus), int(4 * largest * num_gpus_per_node * buffers)
    return layer, int(18 * parameters / nnodes * buffers)


def _count(model: Any) -> tuple[int, int]:
    """Return the number of parameters of the model and of its largest layer. Shared parameters count once."""
    if hasattr(model, "parameters") and hasattr(model, "modules"):
        parameters = sum(parameter.numel() for parameter in {id(p): p for p in model.parameters()}.values())
        largest = max(
            sum(parameter.numel() for parameter in module.parameters(recurse=False)) for module in model.modules()
        )
        if parameters == 0:
            raise ConfigurationError(f"the model {type(model).__qualname__} has no parameters")
        return parameters, largest
    if isinstance(model, float) and model.is_integer():  # 7e9
        model = int(model)
    parameters = check_count("the number of parameters", model)
    return parameters, max(1, parameters // 40)


def _size(size: int) -> str:
    return f"{size / 2**30:.1f} GB" if size >= 100 << 20 else f"{size / 2**20:.1f} MB"
