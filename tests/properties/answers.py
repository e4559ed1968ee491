"""How a command answers: with a result, or with a message that names what is wrong."""

from __future__ import annotations

import contextlib
import io
import re
import time
from collections.abc import Callable, Sequence

from mok_megatron.resources import data_folder

BASIS = ["--shape", "256,128,64,8,2,64", "--cluster", "h200_x2", "--ep", "2", "--mok-macrobatch-size", "8192"]
"""A layer that `simulate` can do."""
SECONDS = 20
"""Of one core: no case may take longer; nearly all take less than a tenth of a second."""
MODELS, CLUSTERS = (data_folder("configs") / kind for kind in ("models", "clusters"))


def outcome(main: Callable[[Sequence[str]], int], words: list[str]) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a command."""
    out, err = io.StringIO(), io.StringIO()
    start = time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(words)
        except SystemExit as end:  # argparse
            status = end.code if isinstance(end.code, int) else 1
    assert time.process_time() - start < SECONDS, words
    return status, out.getvalue(), err.getvalue()


def assert_answered(main: Callable[[Sequence[str]], int], words: list[str]) -> str | None:
    """The command's output, or None where it was refused with a message."""
    status, out, err = outcome(main, words)
    assert status in (0, 2), (status, err)
    assert "Traceback" not in err
    if status == 0:
        assert out.strip()
        return out
    assert re.search(r"error: |mok-megatron (plan|simulate): |pretrain: |compare: ", err), err
    return None
