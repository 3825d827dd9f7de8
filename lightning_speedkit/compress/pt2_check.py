"""Looks into a file of ``torch.export`` before torch does, because torch would execute what is pickled in it.

``torch.export.load`` (2.13, 2.14) unpickles tensor subclasses, sample inputs and custom objects without a limit, looks
operators up by any dotted name under ``torch``, and evaluates the expressions of sizes. Here pickles must pass
``torch.load(weights_only=True)``, custom objects are refused, operators must be of ``torch.ops`` or plain arithmetic,
and expressions may hold only names of sizes and functions. Whether what remains can be trusted is still the
question of where the file comes from: the code that runs is that of the operators that it names.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from typing import Any

import torch

from lightning_speedkit.errors import QuantizationError

__all__ = ["check_program_file"]

_OPERATORS = re.compile(r"^(torch\.ops\.(aten|prims|torchao|quantized|quantized_decomposed)\.[\w.]+"
                        r"|(_operator|math)\.\w+|torch\._?sym_\w+"
                        r"|torch\.ops\.export\.access_subclass_inner_tensor\.default)$")  # fmt: skip
_EXPRESSION = re.compile(r"^[\w\s+\-*/(),<>=&|~]*$")  # no dot, no quote, no bracket: nothing to reach code with
_EXPRESSION_NAME = re.compile(r"[A-Za-z_]\w*")
_SYMBOL = re.compile(r"^[suz]\d+$")
_DECLARED = re.compile(r"\bSymbol\('([suz]\d+)'(?:, \w+=(?:True|False))*\)")
_FUNCTIONS = {
    "Eq", "Ne", "Lt", "Le", "Gt", "Ge", "Max", "Min", "Mod", "PythonMod", "FloorDiv", "CleanDiv", "CeilDiv", "Abs",
    "Integer", "Pow", "Add", "Mul", "And", "Or", "Not", "ModularIndexing", "Where", "floor", "ceiling",
    "IntTrueDiv", "FloatTrueDiv", "ToFloat", "TruncToInt", "RoundToInt", "PowByNatural", "Identity", "True", "False",
    "oo", "int_oo", "LShift", "RShift", "Piecewise", "StrictLessThan", "LessThan", "GreaterThan", "StrictGreaterThan",
}  # fmt: skip


def check_program_file(content: bytes, name: str) -> None:
    """QuantizationError, which says ``name``, if ``content`` is no program of torch.export or asks for code."""
    try:
        reader = torch._C.PyTorchFileReader(io.BytesIO(content))
        records = [str(record) for record in reader.get_all_records()]
    except Exception as error:  # a RuntimeError of the zip reader, or what it raises in other versions
        raise QuantizationError(f"{name} is damaged or no file of torch.export ({_in_a_line(error)}).") from error
    for record in records:
        if record.endswith(".json"):
            _check_json(reader, record, name)
        elif record.endswith((".pt", ".so", ".o")) or "/custom_obj_" in record or "/opaque_obj_" in record:
            if record.startswith("data/sample_inputs/"):
                _check_pickle(reader.get_record(record), record, name)
            else:
                raise QuantizationError(f"{name} holds {record}, an object with code; it is not loaded.")


def _check_json(reader: Any, record: str, name: str) -> None:
    try:
        told = json.loads(reader.get_record(record))
    except ValueError as error:
        raise QuantizationError(f"{name} is damaged: {record} is no JSON.") from error
    folder = record.rpartition("/")[0]
    for key, value in _entries(told):
        if key == "target" and isinstance(value, str) and not _OPERATORS.match(value):
            raise QuantizationError(
                f"{name} calls {value!r:.100}, which is no operator of a network; it is not loaded."
            )
        if key == "expr_str" and isinstance(value, str) and not _is_arithmetic(value):
            raise QuantizationError(f"{name} holds the expression {value!r:.100}; it is not loaded.")
        if key == "path_name" and isinstance(value, str) and value.startswith(("custom_obj_", "opaque_obj_")):
            raise QuantizationError(f"{name} holds {value}, an object with code; it is not loaded.")
        if isinstance(value, dict) and value.get("use_pickle"):
            pickled = f"{folder}/{value.get('path_name')}"
            _check_pickle(reader.get_record(pickled), pickled, name)


def _is_arithmetic(expression: str) -> bool:
    expression = _DECLARED.sub(r"\1", expression)
    names = _EXPRESSION_NAME.findall(expression)
    return bool(_EXPRESSION.match(expression)) and all(n in _FUNCTIONS or _SYMBOL.match(n) for n in names)


def _check_pickle(content: bytes, record: str, name: str) -> None:
    try:
        torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # UnpicklingError, and whatever a damaged one raises
        raise QuantizationError(f"{name} holds {record}, which asks for code ({_in_a_line(error)}).") from error


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield str(key), part
            yield from _entries(part)
    elif isinstance(value, list):
        for part in value:
            yield from _entries(part)


def _in_a_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]:.200}"
