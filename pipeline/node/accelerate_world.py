"""Have Accelerate and torch_xla use the run's ranks and devices, by variables that they read at import."""

import functools
import inspect
import os
import sys
from collections.abc import MutableMapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

from manycpu.pipeline.node.emit import NodeExit, warn
from manycpu.pipeline.node.world import Rank
from manycpu.pipeline.spec.exit_records import EXIT_NOT_TOGETHER
from manycpu.pipeline.spec.words import is_true

_USE_CPU: Final = "ACCELERATE_USE_CPU"


def prepare(rank: Rank) -> None:
    """Set ACCELERATE_USE_CPU if there are several ranks.

    Without the variable Accelerate takes each rank on CPUs for a world of one process. If run.env sets the
    variable, its value stays; if that value means false, warn.
    """
    if rank.world_size == 1:  # with it set, Accelerate would wrap the model of a single rank for several
        return
    if _USE_CPU not in os.environ.get("MANYCPU_USER_ENV", "").split(","):
        os.environ[_USE_CPU] = "true"
        return
    value = os.environ.get(_USE_CPU, "")
    if not is_true(value) and rank.local_rank == 0:  # one warning for each node
        warn(f"run.env sets {_USE_CPU} to {value!r}: Accelerate may take each rank for a world of its own")


def prepare_devices(environ: MutableMapping[str, str], devices: int | None) -> None:
    """Have torch_xla, Accelerate and transformers train on ``devices`` XLA devices; None: on CPUs.

    This sets environment variables that these packages read; a variable that is set already stays. With None,
    nothing is set outside of a run or if torch_xla is not installed.
    """
    if devices is not None:
        variables = {
            "CPU_NUM_DEVICES": str(devices),  # where there is no TPU, and where PJRT_DEVICE is CPU
            "TF_CPP_MIN_LOG_LEVEL": "2",  # else XLA's partitioner warns with every compilation
        }
        if environ.get("MANYCPU_DTYPE") == "bf16":
            variables["ACCELERATE_MIXED_PRECISION"] = "bf16"
    elif "MANYCPU_RUN" in environ and find_spec("torch_xla") is not None:
        variables = {"USE_TORCH_XLA": "false"}  # else Accelerate uses XLA's device
    else:
        return
    for name, value in variables.items():
        environ.setdefault(name, value)


def _state() -> dict[str, Any]:
    """Return the state that all of Accelerate's objects share; empty: the program has not made one."""
    state_class = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    return getattr(state_class, "_shared_state", {})


def own_state(state_class: Any) -> Any:
    """Make an object of a state class of Accelerate, such as PartialState, with this process's own state.

    Unpickling such an object calls this function, because the state of the process that pickled it is wrong
    here.
    """
    state = state_class.__new__(state_class)
    state.__dict__ = state_class._shared_state  # noqa: SLF001 - as its __init__ does
    return state


def set_backend(backend: str) -> None:
    """Replace the backend in Accelerate's state, where Accelerate has put its own default.

    Called when Accelerate makes the default process group.
    """
    shared = _state()
    if shared.get("backend"):  # a state without a backend is a world of one process
        shared["backend"] = backend


def adapt_at_import(world_size: int) -> None:
    """Correct how Accelerate trains several ranks on CPUs, once it is imported; for one rank do nothing."""
    if world_size == 1:
        return
    if "accelerate" in sys.modules:
        _adapt()
    else:
        sys.meta_path.insert(0, _AfterImport())


class _AfterImport(MetaPathFinder):
    """Finds Accelerate on sys.path, and adapts it when its modules have been executed."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return Accelerate's spec, with a loader that also adapts it; None: another module, or not found."""
        if fullname != "accelerate":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _adapt()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _adapt() -> None:
    """Correct Accelerate's classes, if its modules that define them are imported."""
    accelerator_class = getattr(sys.modules.get("accelerate.accelerator"), "Accelerator", None)
    state_class = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    if accelerator_class is not None and state_class is not None:
        _train_after_evaluation(accelerator_class)
        _shard_on_cpus(state_class)


def _train_after_evaluation(accelerator_class: Any) -> None:
    """Have Accelerate wrap a model for training even if the model was prepared for an evaluation before.

    Accelerate 1.15 prepares no model twice, and ``Trainer.evaluate()`` prepares it without a wrapper. With
    ``Trainer.train()`` after it, each rank would train alone.
    """
    original = accelerator_class.prepare_model

    @functools.wraps(original)
    def prepare_model(
        self: Any, model: Any, device_placement: Any = None, evaluation_mode: bool = False
    ) -> Any:
        """Prepare a model as Accelerate does: mark it in an evaluation, wrap a marked one for training."""
        if evaluation_mode:
            was_prepared = getattr(model, "_is_accelerate_prepared", False)
            prepared = original(self, model, device_placement, evaluation_mode)
            # __dict__: only if this object has the mark, not if a wrapper around it has.
            if not was_prepared and model.__dict__.get("_is_accelerate_prepared"):
                model._manycpu_evaluated = True  # noqa: SLF001 - Accelerate marks models so too
            return prepared
        if model.__dict__.pop("_manycpu_evaluated", False):
            # Undo the preparation for the evaluation, so that Accelerate wraps the model below.
            self.unwrap_model(model, keep_fp32_wrapper=False)
            model._is_accelerate_prepared = False  # noqa: SLF001
            self._models = [other for other in self._models if other is not model]
        return original(self, model, device_placement, evaluation_mode)

    accelerator_class.prepare_model = prepare_model


def _shard_on_cpus(state_class: Any) -> None:
    """Have Accelerate shard models by FSDP on CPUs if the program asks for it.

    Accelerate 1.15 ignores that request on CPUs, and each rank would hold a replica. All objects of the class
    share their attributes, so the first object with an FSDP plugin sets it for the others.
    """
    original = state_class.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        """Make a state as Accelerate does; on CPUs, set its type to FSDP if a plugin asks for that."""
        original(self, *args, **kwargs)  # sets the distributed type again, which all objects share
        shared_plugin = getattr(self, "fsdp_plugin", None)  # set here for an earlier object
        plugin = kwargs.get("fsdp_plugin") or shared_plugin
        if plugin is None or self.distributed_type.value != "MULTI_CPU":
            return
        if plugin.fsdp_version == 1:
            raise ValueError(
                "FSDP of version 1 does not train on CPUs: set fsdp_version to 2 "
                "(`accelerate to-fsdp2` translates a config)"
            )
        if shared_plugin is None and self._mixed_precision != "no":  # once, as Accelerate does for FSDP
            plugin.set_mixed_precision(self._mixed_precision)
        self.distributed_type = type(self.distributed_type).FSDP
        self.fsdp_plugin = plugin

    state_class.__init__ = init


def widen_fp16() -> None:
    """Have ``Accelerator(mixed_precision="fp16")`` use bf16 and warn; it would use fp32 silently."""
    from accelerate import Accelerator

    original = Accelerator.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        """Make an Accelerator, with bf16 in place of fp16."""
        bound = inspect.signature(original).bind(self, *args, **kwargs)
        if str(bound.arguments.get("mixed_precision")) == "fp16":
            warn("mixed_precision 'fp16' becomes 'bf16': CPUs have no fp16 to train in")
            bound.arguments["mixed_precision"] = "bf16"
        original(*bound.args, **bound.kwargs)

    Accelerator.__init__ = init


def check(program: str, world_size: int) -> None:
    """End the rank with exit code 86 if Accelerate's world has another size than that of all ranks.

    A script that did not use Accelerate passes.
    """
    size = _state().get("num_processes", world_size)
    if size != world_size:
        raise NodeExit(
            EXIT_NOT_TOGETHER,
            f"{program} ended with a state of Accelerate for a world of {size}, although {world_size} ranks "
            "met: each of them trained alone. Accelerate's first object decides: begin with "
            "Accelerator(cpu=True) or PartialState(cpu=True), and leave ACCELERATE_USE_CPU out of run.env.",
        )
