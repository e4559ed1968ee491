"""What the compiler has made of the kernels: the tensor-core instructions of each architecture, and registers that do.

Looks at libraries that are in the cache (`mok-megatron build --arch 90a,100a,103a`); compiles only the tiles
of MXFP8 and of two CTAs.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest

from mok_megatron import build
from tests.kernels.conftest import HERE, disassembly, nvcc

HOPPER, BLACKWELL = ("90a",), ("100a", "103a")
# As in mangled names, which tell "Fp8ForwardProgram" apart by its length.
FORWARD, BACKWARD = "14ForwardProgram", "15BackwardProgram"
FP8_FORWARD, FP8_BACKWARD = "17Fp8ForwardProgram", "18Fp8BackwardProgram"
MX_FORWARD, MX_BACKWARD = "16MxForwardProgram", "17MxBackwardProgram"
MEGAKERNELS = (FORWARD, BACKWARD)
FP8_MEGAKERNELS = (FP8_FORWARD, FP8_BACKWARD, MX_FORWARD, MX_BACKWARD)

LOCAL_MEMORY = {
    (BACKWARD, "100a"): 16,
    (BACKWARD, "103a"): 24,
    (BACKWARD, "90a"): 24,
    (FP8_FORWARD, "90a"): 80,
    (FP8_BACKWARD, "90a"): 296,
    (MX_BACKWARD, "90a"): 72,
}
"""Instructions on local memory that are known and harmless: a few scalars, kept once a tile, while a product is waited
for with all 128 accumulators to come; in FP8 also addresses of scales, once in four stages. The FP8 backward has each
of these three times, for its three products, and what dHidden's epilogue loads ahead. Elsewhere none."""


def instructions(code: str) -> dict[str, Counter[str]]:
    """Function -> instruction -> how often; the names up to the first dot and whole."""
    found: dict[str, Counter[str]] = {}
    for block in re.split(r"^\s*Function : ", code, flags=re.MULTILINE)[1:]:
        name, _, text = block.partition("\n")
        whole = re.findall(r"/\*[0-9a-f]{4,6}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.a-z]*)", text)
        found[name.strip()] = Counter(whole) + Counter(i.split(".")[0] for i in whole if "." in i)
    return found


@pytest.fixture(scope="module", params=[*HOPPER, *BLACKWELL])
def library(request):
    arch = request.param
    try:
        path = build.cached_library(arch)
    except build.BuildError as error:
        pytest.skip(str(error).splitlines()[0])
    if path is None:
        pytest.skip(f"the cache has no library of these sources: mok-megatron build --arch {arch}")
    return arch, instructions(disassembly(path))


def megakernels(functions):
    found = {m: [counts for name, counts in functions.items() if m in name] for m in MEGAKERNELS}
    assert all(len(counts) == 1 for counts in found.values()), list(functions)
    return {m: counts[0] for m, counts in found.items()}


def test_products_are_on_the_tensor_cores(library):
    arch, functions = library
    for name, code in megakernels(functions).items():
        assert not any(i.startswith(("HMMA", "IMMA", "QMMA")) for i in code), "tensor cores as before Hopper"
        if arch in HOPPER:
            assert code["HGMMA.64x256x16.F32.BF16"] >= (4 if name == FORWARD else 16), code
            assert not code["UTCHMMA"] and not code["LDTM"]
        else:
            assert not code["HGMMA"]
            # Three pairs of majors, four instructions a stage.
            assert code["UTCHMMA"] >= 12, code
            assert code["LDTM"] >= 2 and any(i.startswith("LDTM.16dp256bit") for i in code), "drained by our epilogues"
            assert code["UTCBAR"] >= 6, "a stage's operands and a tile's accumulators are announced as done"
            assert code["UTCATOMSWS"] >= 2, "tensor memory is taken and given back"
            if name == BACKWARD:
                assert code["STTM"] >= 2, "accumulators of a cut expert are put back"
        assert code["UTMALDG"] >= 2, "operands by TMA"
        assert code["USETMAXREG"] >= (2 if arch in HOPPER else 3), "registers go to those who store"


def test_fp8_products_are_hopper_s(library):
    arch, functions = library
    # FC1 and FC2 share their product; FC1, dHidden and dX have one each.
    for kernel, products in ((FP8_FORWARD, 1), (FP8_BACKWARD, 3)):
        found = [code for name, code in functions.items() if kernel in name]
        assert len(found) == (arch in HOPPER), list(functions)
        for code in found:
            assert code["QGMMA.64x128x32.F32.E4M3.E4M3"] == 8 * products, "two halves of four"


def test_mxfp8_products_are_those_of_bf16(library):
    arch, functions = library
    for kernel in (MX_FORWARD, MX_BACKWARD):
        found = [code for name, code in functions.items() if kernel in name]
        assert len(found) == (arch in HOPPER), list(functions)
        for code in found:
            assert code["HGMMA.64x256x16.F32.BF16"] >= 8 and not code["QGMMA"] and code["F2FP"]


def test_nothing_is_spilled(library):
    arch, functions = library
    for name, code in functions.items():
        kernel = next((m for m in (*MEGAKERNELS, *FP8_MEGAKERNELS) if m in name), name)
        assert code["STL"] + code["LDL"] <= LOCAL_MEMORY.get((kernel, arch), 0), (name, code["STL"], code["LDL"])


def test_mxfp8_tiles(tmp_path):
    cubin = tmp_path / "mxfp8.cubin"
    nvcc(HERE / "mxfp8_tiles.cu", cubin, "103a", "-cubin")
    (code,) = instructions(disassembly(cubin)).values()
    assert code["UTCQMMA"] >= 12, "three pairs of majors, four instructions a stage"
    assert code["UTCCP"] >= 9, "scales of A, and twice of B, to tensor memory"
    assert code["LDTM"] >= 2 and not code["UTCHMMA"]
    assert not code["STL"] and not code["LDL"]


def test_tiles_of_two_ctas(tmp_path):
    cubin = tmp_path / "pair.cubin"
    nvcc(HERE / "pair_tiles.cu", cubin, "103a", "-cubin")
    (code,) = instructions(disassembly(cubin)).values()
    assert code["UTCHMMA.2CTA"] == code["UTCHMMA"] >= 12, (
        "three pairs of majors, four instructions a stage; all of both CTAs"
    )
    assert any(i.startswith("UTCBAR.2CTA.MULTICAST") for i in code), "stages and tiles are announced to both CTAs"
    assert any(i.startswith("UTMALDG.4D.2CTA") for i in code), "bytes are counted by the leader"
    assert code["LDTM"] >= 2 and any(i.startswith("LDTM.16dp256bit") for i in code), "drained as by one CTA"
    assert code["UCGABAR_ARV"] >= 2 and code["UCGABAR_WAIT"] >= 2, "both begin, and neither leaves before the other"
    assert not code["STL"] and not code["LDL"]
