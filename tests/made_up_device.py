"""A device that no machine has: tensors that behave as a GPU's do, though what they hold lies in main memory.

They refuse to meet a tensor of main memory in any operation, and to be read without a transfer; every transfer is
counted. So whoever forgets to move something fails here as on a GPU, and values can be compared to the bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from specserve_kernels import Ops
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("lazy")  # a kind that torch has a name for and, here, no code
HOST = torch.device("cpu")

COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class Elsewhere(Tensor):
    """A tensor on the device; `held` is what it holds."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Elsewhere:
        size, stride, offset = held.size(), held.stride(), held.storage_offset()
        with torch.inference_mode(False):  # so that views of it may be made in either mode
            made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls, size, strides=stride, storage_offset=offset, dtype=held.dtype, device=DEVICE
            )
        made.held = held
        return made  # type: ignore[no-any-return]

    def tolist(self) -> Any:
        return self.cpu().tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside of the device's own context")


def held(found: Any) -> Any:
    """Tensors of the device, anywhere in this, as what they hold."""
    return tree_map(lambda x: x.held if isinstance(x, Elsewhere) else x, found)


class MadeUpDevice(TorchDispatchMode):
    """Within this context the device is there. `moves`: transfers so far, by where to."""

    def __init__(self) -> None:
        super().__init__()
        self.moves: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        there = [leaf for leaf in leaves if isinstance(leaf, Elsewhere)]
        made_there = any(isinstance(leaf, torch.device) and leaf.type == DEVICE.type for leaf in leaves)
        if not there and not made_there:
            return func(*args, **kwargs)
        with self:  # operations that are made of others are taken apart first
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        if func in COPIES:
            return self._copied(func, args, kwargs)
        strangers = [x for x in leaves if isinstance(x, Tensor) and not isinstance(x, Elsewhere) and x.dim()]
        if strangers:
            raise RuntimeError(f"{func}: tensors of the device and of main memory")
        given = tree_map(lambda x: HOST if isinstance(x, torch.device) else x, (args, kwargs))
        found = func(*held(given[0]), **held(given[1]))
        known = {id(leaf.held): leaf for leaf in there}  # operations in place give back what they were given

        def returned(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return known[id(x)] if id(x) in known else Elsewhere(x)

        return tree_map(returned, found)

    def _copied(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if func is COPIES[1]:
            target, source, *_ = args
            self._count(source, isinstance(target, Elsewhere))
            func(held(target), held(source))
            return target
        target = kwargs.get("device")
        to_device = isinstance(args[0], Elsewhere) if target is None else target.type == DEVICE.type
        self._count(args[0], to_device)
        found = func(held(args[0]), **{**kwargs, "device": HOST})
        return Elsewhere(found) if to_device else found

    def _count(self, source: Tensor, to_device: bool) -> None:
        if isinstance(source, Elsewhere) != to_device:
            self.moves["device" if to_device else "host"] += 1


def wrapped(ops: Ops) -> Ops:
    """The same operations on the device: what they are given must lie there."""
    return _DeviceOps(ops)  # type: ignore[return-value]


class _DeviceOps:
    sample = None
    decoder = None

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.name = ops.name

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = getattr(self._ops, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            given = [_taken(value) for value in args], {key: _taken(value) for key, value in kwargs.items()}
            return _given_back(operation(*given[0], **given[1]))

        return call


def _taken(value: Any) -> Any:
    """What an operation reads, held; AssertionError if any of it is in main memory."""
    if isinstance(value, Tensor):
        assert isinstance(value, Elsewhere), "an operation was given a tensor of main memory"
        return value.held
    if is_dataclass(value) and not isinstance(value, type):
        own = {field.name: getattr(value, field.name) for field in fields(value) if field.name != "packed"}
        return replace(value, **{name: _taken(part) for name, part in own.items()})
    return value


def _given_back(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Elsewhere(value)
    if isinstance(value, tuple):
        return tuple(_given_back(part) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        own = {field.name: getattr(value, field.name) for field in fields(value) if field.name != "packed"}
        return replace(value, **{name: _given_back(part) for name, part in own.items()})
    return value
