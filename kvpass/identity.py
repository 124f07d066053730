"""What a model's traced program may depend on besides its weights: the code and settings its modules hold."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


class Unidentifiable(TypeError):
    """An object without a stable description."""


def settings(model: nn.Module) -> Iterator[str]:
    """A line for every attribute of every module that is neither a weight nor a module of the tree.

    Functions count with their bytecode, constants, defaults and closures: two models of one class that were given
    different functions are different models.

    Raises:
        Unidentifiable: an attribute is of a kind that cannot be described the same way in every process.
    """
    own = set(vars(nn.Module()))
    for path, module in model.named_modules():
        yield f"{path} {module.training}"
        for name, value in sorted(vars(module).items()):
            if name not in own:
                yield f"{path}.{name} {''.join(_describe(value, ()))}"


def _describe(value: object, above: tuple[int, ...]) -> Iterator[str]:
    if id(value) in above:
        yield "itself"
        return
    above = (*above, id(value))
    if isinstance(value, _PLAIN):
        yield f"{type(value).__name__} {value!r};"
    elif isinstance(value, enum.Enum):
        yield f"{value};"
    elif isinstance(value, type):
        yield f"{value.__module__}.{value.__qualname__};"
    elif isinstance(value, Tensor):  # a tensor kept outside the buffers is a constant of the trace, which is not stored
        yield f"tensor {tuple(value.shape)} {value.dtype};"
    elif isinstance(value, nn.Module):
        yield f"module {type(value).__qualname__};"
    elif isinstance(value, types.CodeType):
        yield f"code {value.co_code.hex()} {value.co_names} {value.co_varnames};"
        yield from _each(value.co_consts, above)
    elif isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        yield f"function {value.__module__}.{value.__qualname__}"
        yield from _each((value.__code__, value.__defaults__, value.__kwdefaults__, *cells), above)
    elif isinstance(value, types.MethodType):
        yield from _each((value.__func__, value.__self__), above)
    elif isinstance(value, functools.partial):
        yield from _each((value.func, value.args, value.keywords), above)
    elif isinstance(value, (types.BuiltinFunctionType, types.ModuleType)):
        yield f"{value.__name__};"
    elif isinstance(value, Mapping):
        yield from _each([part for key in value for part in (key, value[key])], above)
    elif isinstance(value, (list, tuple)):
        yield from _each(value, above)
    elif isinstance(value, (set, frozenset)):
        yield from sorted("".join(_describe(part, above)) for part in value)
    elif hasattr(value, "to_json_string"):
        yield value.to_json_string()
    elif dataclasses.is_dataclass(value):
        yield from _each([getattr(value, field.name) for field in dataclasses.fields(value)], above)
    elif hasattr(value, "__dict__"):
        yield f"{type(value).__module__}.{type(value).__qualname__}"
        yield from _each([part for key in sorted(vars(value)) for part in (key, vars(value)[key])], above)
    else:
        raise Unidentifiable(f"{type(value).__qualname__} has no stable description")


def _each(values: Iterable, above: tuple[int, ...]) -> Iterator[str]:
    yield "("
    for value in values:
        yield from _describe(value, above)
    yield ")"
