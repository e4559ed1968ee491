"""Where the data folders are: ``kernels`` (CUDA sources) and ``configs`` (models, clusters, tuned settings).

In a checkout they stand beside the package, at the top of the repository; in an installed wheel they are
inside it, as ``mok_megatron/_data/<folder>``.
"""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def data_folder(name: str) -> Path:
    """Path of the data folder ``name``; FileNotFoundError says which places were searched."""
    places = []
    if (PACKAGE.parent / "pyproject.toml").is_file():  # a checkout, used in place or installed with pip -e
        places.append(PACKAGE.parent / name)
    places.append(PACKAGE / "_data" / name)
    for place in places:
        if place.is_dir():
            return place
    searched = ", ".join(str(place) for place in places)
    raise FileNotFoundError(
        f"mok_megatron has no folder '{name}' (searched {searched}): reinstall the package"
    )
