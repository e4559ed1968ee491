"""Copies the data folders of the checkout into the wheel; everything else is in pyproject.toml.

The CUDA sources and the model and cluster descriptions live at the top of the repository, where people look
for them. A wheel carries them as ``mok_megatron/_data/<folder>``; ``mok_megatron.resources`` finds either.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
DATA_FOLDERS = ("kernels", "configs")


class BuildWithData(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:  # a checkout reads its own folders
            return
        for name in DATA_FOLDERS:
            target = Path(self.build_lib, "mok_megatron", "_data", name)
            shutil.rmtree(target, ignore_errors=True)  # a file removed from the sources must not linger
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("*.o", "*.so", ".*"))


setup(cmdclass={"build_py": BuildWithData})
