"""A trial leaves no trace: what the code of a model notes while it is tried is put back.

Blocks and hooks note things in attributes, in lists and dictionaries of a module or of a function
around them, and in buffers. Everything of that kind which the functions of the model can reach is
copied before and compared afterwards. A copy of the whole model would not do: it costs the memory
of the weights, sharded models and models with stored graphs cannot be copied, and a list that lies
beside the model would still be written.

Not put back: what leaves the process (files, prints), iterators, and tensors of more than a
million values that are no buffers. Packages that are installed keep what they note.
"""

from __future__ import annotations

import random
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_INSTALLED = tuple(
    sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")
)
# Other threads set modes and hooks of the same modules meanwhile. Weights are not written.
_OF_OTHERS = ("training", "_parameters", "_modules", "_forward", "_backward", "_state", "_load")
# Wrappers of several processes note what they have set up between them, which stays set up.
_OF_PROCESSES = ("torch.nn.parallel", "torch.distributed")
_MOST_VALUES = 1 << 20
_MOST_ITEMS = 10_000
_MISSING = object()
_CODE = (
    types.FunctionType,
    types.MethodType,
    partial,
    staticmethod,
    classmethod,
    property,
    type,
)


@contextmanager
def nothing_noted(model: nn.Module) -> Iterator[None]:
    """Put back what the code of `model` writes inside the `with` block, beside its outputs."""
    record = _Record()
    for module in model.modules():
        record.add_module(module)
    record.follow()
    numbers = random.getstate()
    try:
        yield
    finally:
        random.setstate(numbers)
        for put_back in record.put_back:
            put_back()


class _Record:
    """What can be reached from a model, and for each thing the function that puts it back."""

    def __init__(self) -> None:
        self.put_back: list[Callable[[], None]] = []
        self._waiting: list[Any] = []
        # The objects themselves, because an id is given again once its object is gone.
        self._seen: dict[int, Any] = {}

    def add_module(self, module: nn.Module) -> None:
        """Note the attributes of a module, its buffers, and what its methods can reach."""
        self._seen[id(module)] = module
        if type(module).__module__.startswith(_OF_PROCESSES):
            return
        attributes = vars(module)
        noted = {name: v for name, v in attributes.items() if not name.startswith(_OF_OTHERS)}
        self._waiting += noted.values()
        for name in attributes.keys() - noted.keys() - {"_parameters", "_modules"}:
            if isinstance(attributes[name], dict):  # hooks
                self._waiting += list(attributes[name].values())
        self.put_back.append(partial(_put_back_attributes, attributes, noted))
        for _, buffer in module.named_buffers(recurse=False):
            self._add_tensor(buffer)
        self._waiting += type(module).__mro__

    def follow(self) -> None:
        """Note everything that what was noted refers to."""
        while self._waiting:
            value = self._waiting.pop()
            if id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            self._add(value)

    def _add(self, value: Any) -> None:
        if isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter) and value.numel() <= _MOST_VALUES:
                self._add_tensor(value)
        elif isinstance(value, dict):
            # By `items`, because a class may look up its keys in its own way.
            self.put_back.append(partial(_put_back_dict, value, dict(value.items())))
            self._follow_items(value.values())
        elif isinstance(value, list | deque):
            self.put_back.append(partial(_put_back_list, value, list(value)))
            self._follow_items(value)
        elif isinstance(value, set):
            self.put_back.append(partial(_put_back_set, value, set(value)))
        elif isinstance(value, tuple):
            self._follow_items(value)
        elif isinstance(value, nn.Module):
            self.add_module(value)
        elif isinstance(value, _CODE):
            self._add_code(value)
        elif _is_own(type(value)) and hasattr(value, "__dict__"):
            attributes = vars(value)
            self.put_back.append(partial(_put_back_dict, attributes, dict(attributes)))
            self._waiting += [*attributes.values(), type(value)]

    def _add_code(self, value: Any) -> None:
        if isinstance(value, types.FunctionType):
            self._add_function(value)
        elif isinstance(value, types.MethodType):
            self._waiting += [value.__self__, value.__func__]
        elif isinstance(value, partial):
            self._waiting += [value.func, value.args, value.keywords]
        elif isinstance(value, staticmethod | classmethod):
            self._waiting.append(value.__func__)
        elif isinstance(value, property):
            self._waiting += [value.fget, value.fset]
        elif isinstance(value, type):
            self._add_class(value)

    def _follow_items(self, items: Any) -> None:
        if len(items) <= _MOST_ITEMS:
            self._waiting += items

    def _add_tensor(self, tensor: Tensor) -> None:
        self._seen[id(tensor)] = tensor
        if not tensor.is_meta:
            before = tensor.detach().clone()
            self.put_back.append(partial(_put_back_tensor, tensor, before))

    def _add_function(self, function: types.FunctionType) -> None:
        if not _is_own(function):
            return
        names = _global_names(function.__code__)
        known = function.__globals__
        before = {name: known.get(name, _MISSING) for name in names}
        self.put_back.append(partial(_put_back_globals, known, before))
        self._waiting += before.values()
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # a variable that has no value yet
                continue
            self._waiting.append(content)
            self.put_back.append(partial(setattr, cell, "cell_contents", content))
        self._waiting += function.__defaults__ or ()
        self._waiting += (function.__kwdefaults__ or {}).values()

    def _add_class(self, kind: type) -> None:
        if not _is_own(kind):
            return
        plain: dict[str, Any] = {}
        for name, value in vars(kind).items():
            self._waiting.append(value)
            if not (name.startswith("__") or callable(value) or hasattr(value, "__get__")):
                plain[name] = value
        self.put_back.append(partial(_put_back_class, kind, plain))


def _is_own(value: Any) -> bool:
    """Whether a class or a function is the user's, and not one of an installed package."""
    return is_own_package((getattr(value, "__module__", None) or "").partition(".")[0])


@cache
def is_own_package(name: str) -> bool:
    """Whether a package that was imported is the user's."""
    if name in ("__main__", "layershuffle"):
        return name == "__main__"
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None or file.startswith(_INSTALLED):
        return False
    # Those of other paths: of the user, of the system, of the environment below this one.
    return {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _global_names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):  # a function inside
            names |= _global_names(constant)
    return names


def _put_back_attributes(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    for name in list(attributes):
        if name not in before and not name.startswith(_OF_OTHERS):
            del attributes[name]
    for name, value in before.items():
        if attributes.get(name, _MISSING) is not value:
            attributes[name] = value


def _put_back_dict(value: dict[Any, Any], before: dict[Any, Any]) -> None:
    now = dict(value.items())
    if now.keys() != before.keys() or any(now[key] is not item for key, item in before.items()):
        value.clear()
        value.update(before)


def _put_back_list(value: list[Any] | deque[Any], before: list[Any]) -> None:
    if len(value) != len(before) or any(a is not b for a, b in zip(value, before, strict=True)):
        value.clear()
        value.extend(before)


def _put_back_set(value: set[Any], before: set[Any]) -> None:
    if value != before:
        value.clear()
        value.update(before)


def _put_back_tensor(tensor: Tensor, before: Tensor) -> None:
    # Writing what is there already would spoil graphs that have saved the tensor.
    if tensor.shape == before.shape and not torch.equal(tensor, before):
        with torch.no_grad():
            tensor.copy_(before)


def _put_back_globals(known: dict[str, Any], before: dict[str, Any]) -> None:
    for name, value in before.items():
        if value is _MISSING:
            known.pop(name, None)
        elif known.get(name, _MISSING) is not value:
            known[name] = value


def _put_back_class(kind: type, before: dict[str, Any]) -> None:
    for name, value in before.items():
        if vars(kind).get(name, _MISSING) is not value:
            setattr(kind, name, value)
