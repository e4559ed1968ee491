"""The ctypes structs are those of kernels/mok_api.h; needs no GPU and no compiler."""

from __future__ import annotations

import re
from ctypes import c_int32, c_int64, c_uint32, c_uint64, c_void_p

import pytest

from mok_megatron.megakernel import binding
from mok_megatron.resources import data_folder

SCALARS = {"int32_t": c_int32, "uint32_t": c_uint32, "int64_t": c_int64, "uint64_t": c_uint64}


def structs() -> dict[str, list[tuple[str, object]]]:
    """Fields of every struct of the header, in order, as (name, ctypes type)."""
    text = re.sub(r"//.*", "", (data_folder("kernels") / "mok_api.h").read_text())
    found: dict[str, list[tuple[str, object]]] = {}
    for name, body in re.findall(r"typedef struct (\w+) \{(.*?)\} \1;", text, re.S):
        found[name] = []
        for declaration in filter(None, (d.strip() for d in body.split(";"))):
            kind, names = re.fullmatch(r"(?:const )?(\w+)([\s\S]*)", declaration).groups()
            for field in names.split(","):
                pointer = "*" in field
                known = c_void_p if pointer else SCALARS.get(kind) or getattr(binding, kind)
                found[name].append((re.sub(r"\bconst\b|[*\s]", "", field), known))
    return found


def test_the_header_has_the_structs_that_the_binding_has():
    assert set(structs()) == {s.__name__ for s in binding._STRUCTS}


@pytest.mark.parametrize("struct", binding._STRUCTS, ids=lambda s: s.__name__)
def test_same_fields_in_the_same_order(struct):
    assert structs()[struct.__name__] == list(struct._fields_)


def test_version():
    text = (data_folder("kernels") / "mok_api.h").read_text()
    assert int(re.search(r"#define MOK_API_VERSION (\d+)", text).group(1)) == binding.API_VERSION
