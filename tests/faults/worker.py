"""One rank of a Pair: reads scenarios from its standard input until it ends, and answers on a pipe.

Ends as a training script would: by returning from its main function, or by an exception that nobody caught.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TextIO

import torch
import torch.distributed as dist


def main(answers: TextIO) -> None:
    """Run what the test says."""
    from tests.faults import scenarios
    from tests.faults.pair import DEVICES, SHARE_GPU

    rank = int(os.environ["RANK"])
    ranks = None
    for line in sys.stdin:
        name, arguments = json.loads(line)
        begin = time.monotonic()
        value, error, message = None, "", ""
        if name == "connect":
            device = torch.device("cuda", DEVICES[rank])
            torch.cuda.set_device(device)
            if SHARE_GPU:
                dist.init_process_group("gloo")
            else:
                dist.init_process_group("nccl", device_id=device)
            dist.barrier()
            ranks = scenarios.Rank(rank, answers)
        else:
            assert ranks is not None
            # What ends in "_" is there to end the process: its exceptions are nobody's.
            if name.endswith("_"):
                getattr(scenarios, name)(ranks, **arguments)
            else:
                try:
                    value = getattr(scenarios, name)(ranks, **arguments)
                except Exception as caught:
                    error, message = type(caught).__name__, str(caught)
        answer = {"value": value, "error": error, "message": message, "seconds": time.monotonic() - begin}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(os.fdopen(int(sys.argv[1]), "w"))
