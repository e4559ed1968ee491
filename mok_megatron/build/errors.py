"""The error of this package."""

from mok_megatron.errors import MokError


class BuildError(MokError, RuntimeError):
    """The kernel library cannot be built or loaded; the message says why and what to do."""
