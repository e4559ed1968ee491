"""Compiles the CUDA sources into one shared library an architecture, keeps it in a cache, and loads it.

- :mod:`sources`: which files are compiled, and their hash.
- :mod:`toolkit`: finds nvcc and CUTLASS's headers.
- :mod:`cache`: where built libraries are kept, and what makes one trustworthy.
- :mod:`compiler`: runs nvcc, in parallel and with a deadline.
- :mod:`library`: the two calls that others need, `build` and `load_library`.
"""

from mok_megatron.build.errors import BuildError
from mok_megatron.build.library import build, cached_library, load_library
from mok_megatron.build.sources import ARCHITECTURES

__all__ = ["ARCHITECTURES", "BuildError", "build", "cached_library", "load_library"]
