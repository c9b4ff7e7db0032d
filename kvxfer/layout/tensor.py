"""How a tensor of any library lies in memory: address, shape, strides. Nothing is copied."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvxfer.errors import UsageError, invalid

_DTYPE_NBYTES: Final = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "float64": 8,
}
# vLLM's cache_dtype and the short names of configuration files.
_DTYPE_ALIASES: Final = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
}


UNTOLD_GPU: Final = -1
_READ_ONLY: Final = (
    "this memory is read-only, so a peer could not write pages to it: pass writable memory (a copy would not "
    "be the cache)"
)
# DLPack's device types.
_CPU, _CUDA = 1, 2


@dataclass(frozen=True, slots=True)
class TensorView:
    """Where the elements of one tensor lie.

    Attributes
    ----------
    address
        Address of element ``[0, 0, ...]``.
    shape, strides
        Elements and bytes of each axis. Strides are never negative.
    dtype
        The library's name without its prefix: ``"float16"``, ``"bfloat16"``, ``"uint8"``.
    itemsize
        Bytes of one element.
    owner
        The tensor, or the array made of it. Keep it alive while you use `address`.
    gpu
        Index of the GPU that holds the tensor; `UNTOLD_GPU` if its library does not name the GPU; None for
        host memory. The CPU cannot load from or store to GPU memory.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    owner: object
    gpu: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes from the first to the end of the last element, gaps included; 0 when empty."""
        if 0 in self.shape:
            return 0
        return self.itemsize + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))


def view(tensor: Any) -> TensorView:
    """Returns the view of a torch tensor, a numpy array, or anything with the buffer protocol or DLPack.

    For GPU memory pass a torch tensor, or anything with ``__cuda_array_interface__``. This starts no CUDA
    work and waits for none.

    Raises
    ------
    UsageError
        ``invalid-argument`` for read-only memory, negative or zero strides, or an object that is not a
        tensor; ``unsupported`` for memory of a device other than the CPU and CUDA GPUs.
    """
    if isinstance(tensor, TensorView):
        return tensor
    if isinstance(tensor, np.ndarray):
        return _of_array(tensor, tensor)
    # Read torch tensors by their methods: numpy knows neither bfloat16 nor float8, so DLPack through numpy
    # fails.
    if all(hasattr(tensor, name) for name in ("data_ptr", "stride", "element_size", "device")):
        return _of_torch(tensor)
    if hasattr(tensor, "__cuda_array_interface__"):
        return _of_cuda_array(tensor)
    if hasattr(tensor, "__dlpack__"):
        return _of_dlpack(tensor)
    try:
        buffer = memoryview(tensor)
    except TypeError:
        raise invalid(
            f"cannot see memory of a {type(tensor).__name__}: "
            "pass a torch tensor, a numpy array, or an object with DLPack or the buffer protocol"
        ) from None
    return _of_array(np.asarray(buffer), tensor)


def dtype_of(dtype: Any) -> tuple[str, int]:
    """Returns ``(name, nbytes of an element)`` of a dtype of torch or numpy, or of a dtype's name.

    Names are torch's without its prefix, as in `TensorView`. Engines' ``"fp8"`` means e4m3.

    Raises
    ------
    UsageError
        ``invalid-argument`` if the dtype's size is unknown.
    """
    dtype = _instance(dtype)
    name = dtype_name(dtype)
    nbytes = getattr(dtype, "itemsize", None) or _DTYPE_NBYTES.get(name)
    if nbytes is None:
        raise invalid(
            f"the size of an element of dtype {name[:64]!r} is not known: name one of "
            f"{', '.join(_DTYPE_NBYTES)}"
        )
    return name, int(nbytes)


def dtype_name(dtype: Any) -> str:
    """Returns torch's name, without its prefix, for a dtype of torch or numpy, or for a short name."""
    dtype = _instance(dtype)
    name = str(getattr(dtype, "name", dtype)).removeprefix("torch.")
    return _DTYPE_ALIASES.get(name, name)


def _instance(dtype: Any) -> Any:
    # numpy.float16 is a class; its dtype is an instance.
    return np.dtype(dtype) if isinstance(dtype, type) else dtype


def flatten(tensors: Any) -> Iterator[Any]:
    """Yields the tensors of a nested list, tuple or dict in order; one tensor yields itself."""
    if isinstance(tensors, Mapping):
        for item in tensors.values():
            yield from flatten(item)
    elif isinstance(tensors, (list, tuple)):
        for item in tensors:
            yield from flatten(item)
    else:
        yield tensors


def views_of(memory: Any, what: str) -> list[TensorView]:
    """Returns the views of all tensors of `memory`, in the order of `flatten`.

    Raises
    ------
    UsageError
        As in `view`; the message names `what`, and which one of several tensors.
    """
    tensors = list(flatten(memory))
    views = []
    for index, tensor in enumerate(tensors):
        try:
            views.append(view(tensor))
        except UsageError as error:
            which = f"tensor {index} of {what}" if len(tensors) > 1 else what
            raise UsageError(f"{which}: {error.args[0]}", code=error.code) from None
    return views


def covering_spans(views: list[TensorView]) -> list[tuple[int, int]]:
    """Returns ``(address, nbytes)`` of the few ranges that cover all views, ascending.

    Ranges that overlap or touch become one. A gap between two tensors stays outside, because other data may
    lie in it.
    """
    spans: list[tuple[int, int]] = []
    for address, nbytes in sorted((v.address, v.nbytes) for v in views if v.nbytes):
        if spans and address <= spans[-1][0] + spans[-1][1]:
            first, length = spans[-1]
            spans[-1] = (first, max(length, address + nbytes - first))
        else:
            spans.append((address, nbytes))
    return spans


def _of_array(array: np.ndarray[Any, Any], owner: object) -> TensorView:
    if not array.flags.writeable:
        raise invalid(_READ_ONLY)
    if array.dtype.hasobject:
        raise invalid("an array of Python objects holds pointers, not bytes")
    return _checked(
        TensorView(
            address=int(array.__array_interface__["data"][0]),
            shape=array.shape,
            strides=array.strides,
            dtype=array.dtype.name,
            itemsize=array.dtype.itemsize,
            owner=owner if owner is array else (owner, array),
        )
    )


def _of_torch(tensor: Any) -> TensorView:
    kind, _, index = str(tensor.device).partition(":")
    if kind not in ("cpu", "cuda"):
        raise UsageError(
            f"this tensor is on {tensor.device}, and no transport of this version reaches its memory: "
            "register a cache on the CPU, or on a CUDA GPU",
            code="unsupported",
        )
    itemsize = int(tensor.element_size())
    return _checked(
        TensorView(
            address=int(tensor.data_ptr()),
            shape=tuple(int(n) for n in tensor.shape),
            strides=tuple(int(s) * itemsize for s in tensor.stride()),
            dtype=str(tensor.dtype).removeprefix("torch."),
            itemsize=itemsize,
            owner=tensor,
            gpu=int(index or 0) if kind == "cuda" else None,
        )
    )


def _of_cuda_array(tensor: Any) -> TensorView:
    # https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html, version 3
    described = tensor.__cuda_array_interface__
    address, read_only = described["data"]
    if read_only:
        raise invalid(_READ_ONLY)
    dtype = np.dtype(described["typestr"])
    shape = tuple(int(n) for n in described["shape"])
    strides = described.get("strides")
    if strides is None:  # C order
        strides = tuple(dtype.itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    gpu = UNTOLD_GPU
    if hasattr(tensor, "__dlpack_device__"):
        device_type, index = tensor.__dlpack_device__()
        gpu = int(index) if int(device_type) == _CUDA else UNTOLD_GPU
    return _checked(
        TensorView(
            address=int(address),
            shape=shape,
            strides=tuple(int(s) for s in strides),
            dtype=dtype.name,
            itemsize=dtype.itemsize,
            owner=tensor,
            gpu=gpu,
        )
    )


def _of_dlpack(tensor: Any) -> TensorView:
    device_type, _ = tensor.__dlpack_device__()
    if int(device_type) != _CPU:
        raise UsageError(
            f"this {type(tensor).__name__} is on DLPack device {device_type}, not on the CPU (1). GPU "
            "memory is read through __cuda_array_interface__, which it does not have: pass a torch tensor "
            "that shares its memory, e.g. from torch.from_dlpack",
            code="unsupported",
        )
    try:
        array = np.from_dlpack(tensor)
    except (BufferError, RuntimeError, TypeError) as error:
        raise UsageError(
            f"numpy cannot import this {type(tensor).__name__} through DLPack ({error}): view it as uint8 "
            "or uint16 and name the dtype in the layout",
            code="unsupported",
        ) from error
    return _of_array(array, tensor)


def _checked(tensor: TensorView) -> TensorView:
    for axis, (n, stride) in enumerate(zip(tensor.shape, tensor.strides, strict=True)):
        if n > 1 and stride <= 0 and 0 not in tensor.shape:
            raise invalid(
                f"axis {axis}, of {n} elements, has a stride of {stride} bytes: flipped and broadcast "
                "tensors cannot be registered; register the tensor that they are a view of"
            )
    return tensor
