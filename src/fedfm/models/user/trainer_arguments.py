"""A Hugging Face Trainer's arguments: each is followed exactly, or refused, or a notice names it as unused.

The reference is transformers' ``Trainer._inner_training_loop``. docs/how-to/hugging-face-script.md lists the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from fedfm.core.rows import Batch
from fedfm.errors import InputError

ITEMS = "(items)"  # key of a batch: the number of targets in the accumulated batch, which Trainers pass to the loss
_OPTIMISERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "sgd": "sgd"}
_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
_OWN_LOOP = (
    *("train", "_inner_training_loop", "training_step", "get_batch_samples", "_prepare_inputs", "_clip_grad_norm"),
    *("create_optimizer", "create_scheduler", "create_optimizer_and_scheduler", "get_optimizer_cls_and_kwargs"),
    *("get_train_dataloader", "_get_train_sampler"),
)
_OWN_VIEW = ("evaluate", "evaluation_loop", "prediction_step", "get_eval_dataloader", "log")
_KNOWN = ("transformers.",)  # packages whose own overrides of a Trainer's methods are accepted
_TRL = "trl."  # its trainers are accepted if they learn from the given rows
_SENTENCES = "sentence_transformers."  # its trainers choose batches and parameters; see _refuse_other_batches
_EMBEDDED = ("sentence_embedding", "scores")
_STEP = "training_step"
_OFFLOADS = "maybe_activation_offload_context"  # a context of TRL trainers, in which transformers' own step runs
_QUIET = ("DefaultFlowCallback", "PrinterCallback", "ProgressCallback", "NotebookProgressCallback")


def is_trainer(thing: Any) -> bool:
    """Whether the object is a ``transformers.Trainer``, without importing transformers."""
    return any(c.__name__ == "Trainer" and c.__module__ == "transformers.trainer" for c in type(thing).__mro__)


class TrainersModule:
    """A Trainer's settings for the training of its module.

    Raises:
        InputError: clients cannot follow one of the settings; the error gives the reason.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.args, self.module = trainer, trainer.args, trainer.model
        _refuse(trainer)

    @property
    def columns(self) -> frozenset[str] | None:
        """The columns that go to the collator; None if all do."""
        if not self.args.remove_unused_columns or _overrides(self.trainer, "get_train_dataloader"):
            return None  # only transformers' own loader drops columns
        self.trainer._set_signature_columns_if_needed()  # SFTTrainer's columns differ from the module's arguments
        return frozenset(self.trainer._signature_columns)

    @property
    def label(self) -> str | None:
        """The key of the target, if there is one."""
        names = list(self.trainer.label_names or [])
        return names[0] if len(names) == 1 else None

    def local(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """``[method.local]`` from the arguments; keys of ``given`` override them.

        Raises:
            InputError: an argument has no counterpart, and ``given`` lacks the key.
        """
        args = self.args
        optim, kind = _text(args.optim), _text(args.lr_scheduler_type)
        name = given.get("name", _OPTIMISERS.get(optim))
        if name is None:
            raise InputError(
                f'Trainer: args.optim = "{optim}" has no counterpart; expected {_quote(_OPTIMISERS)}, or give '
                'local={"name": "adamw"}'
            )
        if args.optim_args and "name" not in given:
            raise InputError(f'Trainer: args.optim_args = "{args.optim_args}": not read; give local={{...}}')
        if "schedule" not in given and (kind not in _SCHEDULES or args.lr_scheduler_kwargs):
            what = f'lr_scheduler_type = "{kind}"' if kind not in _SCHEDULES else "lr_scheduler_kwargs"
            raise InputError(
                f"Trainer: args.{what} has no counterpart; expected {_quote(_SCHEDULES)} without further arguments, "
                'or give local={"schedule": "constant"}'
            )
        if "epochs" not in given and (args.max_steps > 0 or args.num_train_epochs != int(args.num_train_epochs)):
            raise InputError(
                'Trainer: a round has complete epochs; give local={"epochs": 1}, not max_steps or a fraction'
            )
        size, parts = int(args.train_batch_size), int(args.gradient_accumulation_steps)
        found: dict[str, Any] = {
            "name": name,
            "learning_rate": float(args.learning_rate),
            "batch_size": size * parts,
            "epochs": int(args.num_train_epochs),
            "weight_decay": float(args.weight_decay),
        }
        if parts > 1 and "batch_size" not in given:
            found["micro_batch"] = size
        if args.max_grad_norm and args.max_grad_norm > 0:
            found["max_grad_norm"] = float(args.max_grad_norm)
        if "schedule" not in given:
            found["schedule"] = _SCHEDULES[kind]
            if args.warmup_steps and kind != "constant" and "warmup" not in given:
                found["warmup_steps"] = float(args.warmup_steps)
        if name in ("adam", "adamw"):
            found |= {"betas": [args.adam_beta1, args.adam_beta2], "epsilon": args.adam_epsilon}
        return found | dict(given)

    def notices(self, local: Mapping[str, Any]) -> tuple[str, ...]:
        """Notices about the arguments that are used, and those that are not."""
        taken = ", ".join(f"{k} {v}" for k, v in local.items())
        found = [f"client optimiser from the Trainer's arguments, per client and round: {taken}"]
        callbacks = [type(c).__name__ for c in self.trainer.callback_handler.callbacks]
        measures = self.trainer.compute_metrics is not None  # then its own prediction_step is used
        own = () if measures else ("preprocess_logits_for_metrics",)
        view = [name for name in _OWN_VIEW if not (measures and name == "prediction_step")]
        unused = [
            *(f"callback {name}" for name in callbacks if name not in _QUIET),
            *(name for name in own if getattr(self.trainer, name)),
            *(f"its own {name}" for name in view if _overrides(self.trainer, name)),
            *(f"args.{key}" for key in _IGNORED if getattr(self.args, key, None)),
        ]
        if unused:
            found.append(f"of the Trainer, these are not used: {', '.join(unused)}")
        return tuple(found)

    @property
    def no_weight_decay(self) -> frozenset[str]:
        """Trained parameters without weight decay, e.g. biases and norms."""
        self._check_parameters()
        decayed = set(self.trainer.get_decay_parameter_names(self.module))
        return frozenset(n for n, p in self.module.named_parameters() if p.requires_grad and n not in decayed)

    def _check_parameters(self) -> None:
        """Refuse a Trainer that trains parameters outside its module, or some parameters at a different rate.

        Raises:
            InputError: the Trainer does one of these.
        """
        if not _overrides(self.trainer, "get_optimizer_cls_and_kwargs"):
            return
        groups = self.trainer.get_optimizer_cls_and_kwargs(self.args, self.module)[1].get("optimizer_dict", [])
        trained = {id(p) for group in groups for p in group["params"]}
        if trained != {id(p) for p in self.module.parameters() if p.requires_grad}:
            raise InputError(
                "Trainer: its optimiser has parameters outside the module, e.g. of a loss with its own weights; "
                "clients send only the module: put the parameters into it, or take another loss"
            )
        if any(group.get("lr", self.args.learning_rate) != self.args.learning_rate for group in groups):
            raise InputError("Trainer: some parameters have their own learning rate; clients have one rate")

    def weigh(self, parts: Sequence[Batch], native: Callable[[Batch], Any]) -> Iterator[tuple[Batch, float]]:
        """The parts of one accumulated batch, and the factors of their losses, as in ``Trainer.training_step``."""
        trainer = self.trainer
        trainer.current_gradient_accumulation_steps = len(parts)
        items = trainer._get_num_items_in_batch([native(part) for part in parts], self.args.device)
        scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        if scaled is None:
            counted = trainer.model_accepts_loss_kwargs and items is not None
            scaled = counted or trainer.compute_loss_func is not None
        extra = {} if items is None else {ITEMS: torch.as_tensor(items)}
        return ((part | extra, 1.0 if scaled else 1 / len(parts)) for part in parts)

    def loss(self, module: nn.Module, inputs: Any, items: torch.Tensor | None, outputs: bool) -> Any:
        """``Trainer.compute_loss`` in the Trainer's precision; with ``outputs`` also the module's output."""
        options: dict[str, Any] = {"return_outputs": True} if outputs else {}
        if module.training or items is not None:
            options |= {"num_items_in_batch": items}
        with self.precision(module), self.trainer.compute_loss_context_manager():
            return self.trainer.compute_loss(module, inputs, **options)

    def outputs(self, module: nn.Module, inputs: Mapping[str, Any]) -> Any:
        """The module's output in the Trainer's precision; for sentence-transformers one output per text of a row."""
        if _defined_in(self.trainer, "collect_features").startswith(_SENTENCES):
            features, _ = self.trainer.collect_features(dict(inputs))
            with self.precision(module):
                found = [module(text) for text in features]
            return {f"{key}_{i}": of[key] for i, of in enumerate(found) for key in _EMBEDDED if key in of}
        with self.precision(module):
            return module(**inputs)

    def precision(self, module: nn.Module) -> AbstractContextManager[None]:
        """Context manager in which the module computes in the Trainer's precision."""
        return _bf16(module) if self.args.bf16 else nullcontext()

    def begin_checkpointing(self) -> Callable[[], None]:
        """Switch gradient checkpointing on if the arguments ask for it; returns a function that undoes it.

        Raises:
            InputError: the module does not support it.
        """
        key = (
            "activation" if hasattr(self.args, "activation_checkpointing") else "gradient"
        )  # transformers 5.20 renamed gradient checkpointing
        if not getattr(self.args, f"{key}_checkpointing") or getattr(self.module, f"is_{key}_checkpointing", False):
            return lambda: None
        enable = getattr(self.module, f"{key}_checkpointing_enable", None)
        if enable is None:
            raise InputError(
                f"Trainer: args.{key}_checkpointing: the module has no {key}_checkpointing_enable; drop it"
            )
        options = dict(getattr(self.args, f"{key}_checkpointing_kwargs") or {})
        apart = {name: options.pop(name) for name in ("every_n_layers", "offload") if name in options}
        enable(**{f"{key}_checkpointing_kwargs": options or None}, **apart)
        return getattr(self.module, f"{key}_checkpointing_disable")  # type: ignore[no-any-return]


_IGNORED = (  # arguments that change no weight here, or that the run directory replaces
    *("load_best_model_at_end", "push_to_hub", "resume_from_checkpoint", "data_seed", "torch_compile"),
    *("use_liger_kernel", "bf16_full_eval", "fp16_full_eval"),
)


def _refuse(trainer: Any) -> None:
    """Raise an InputError for the first setting that would change the training and is not supported."""
    _refuse_other_batches(trainer)
    for name in _OWN_LOOP:
        where = _overrides(trainer, name)
        of_trl = _defined_in(trainer, name).startswith(_TRL)
        if name == _STEP and of_trl and hasattr(trainer, _OFFLOADS):
            continue
        if where and not (name in _OF_SENTENCES and _defined_in(trainer, name).startswith(_SENTENCES)):
            cure = "take TRL's SFTTrainer, DPOTrainer or RewardTrainer" if of_trl else "override compute_loss"
            raise InputError(
                f"Trainer: {where} overrides {name}, which belongs to the Trainer's own loop and is never "
                f"called here; {cure}, or pass the module with an objective"
            )
    args = trainer.args
    wrong = {
        "fp16": (args.fp16, "it needs a loss scaler, which clients do not have; use bf16 or neither"),
        "deepspeed": (args.deepspeed, "clients train on one device each; drop it"),
        "fsdp": (args.fsdp, "clients train on one device each; drop it"),
        "neftune_noise_alpha": (args.neftune_noise_alpha, "no noise is added to embeddings; drop it"),
        "dataloader_drop_last": (args.dataloader_drop_last, "all of a client's rows are trained on; drop it"),
        "train_sampling_strategy": (
            _text(getattr(args, "train_sampling_strategy", "random")) != "random",
            'each epoch has a new random order; expected "random"',
        ),
        "packing": (
            getattr(trainer, "padding_free", False),
            "batches without padding have no single rows to distribute; expected False, and padding_free = False, too",
        ),
        "activation_offloading": (getattr(args, "activation_offloading", False), "it is not supported here; drop it"),
    }
    for key, (found, why) in wrong.items():
        if found:
            raise InputError(f"Trainer: args.{key}: {why}")
    if args.world_size > 1:
        raise InputError(
            "Trainer: it runs in several processes; federate runs in one: start the script without torchrun"
        )
    fresh = trainer.state.global_step == 0
    if trainer.optimizer_cls_and_kwargs is not None or (
        fresh and (trainer.optimizer is not None or trainer.lr_scheduler is not None)
    ):
        raise InputError(
            "Trainer: it has an optimiser or a schedule as an object, but every client makes its own from the "
            "arguments; give args.optim and args.lr_scheduler_type"
        )


_OF_SENTENCES = ("get_train_dataloader", "get_optimizer_cls_and_kwargs")


def _refuse_other_batches(trainer: Any) -> None:
    """Refuse a Trainer of sentence-transformers whose batches are not rows in a new random order."""
    if not _defined_in(trainer, "get_train_dataloader").startswith(_SENTENCES):
        return
    if _text(trainer.args.batch_sampler) != "batch_sampler":
        raise InputError(
            "Trainer: args.batch_sampler chooses rows by their content, and clients draw theirs in a random order; "
            'expected "batch_sampler", the default'
        )
    if isinstance(trainer.train_dataset, Mapping):
        raise InputError("Trainer: several train datasets; a client has one: give one of them, or clients=...")


def _defined_in(trainer: Any, name: str) -> str:
    """The module of the class that defines the method."""
    return next((c.__module__ for c in type(trainer).__mro__ if name in vars(c)), "")


def _overrides(trainer: Any, name: str) -> str:
    """The class that overrides the method of this name; empty if only the library defines it."""
    where = next((c for c in type(trainer).__mro__ if name in vars(c)), None)
    return "" if where is None or where.__module__.startswith(_KNOWN) else where.__name__


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))


def _quote(names: Mapping[str, Any]) -> str:
    return ", ".join(f'"{name}"' for name in names)


@contextmanager
def _bf16(module: nn.Module) -> Iterator[None]:
    """Context manager: the module's forward pass runs under autocast and returns float32, as with accelerate."""
    from accelerate.utils import convert_outputs_to_fp32

    before, forward = vars(module).get("forward"), module.forward
    device = next(module.parameters()).device.type
    vars(module)["forward"] = convert_outputs_to_fp32(torch.autocast(device, torch.bfloat16)(forward))
    try:
        yield
    finally:
        vars(module).pop("forward")
        if before is not None:
            vars(module)["forward"] = before
