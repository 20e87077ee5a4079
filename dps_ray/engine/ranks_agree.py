"""What all tensor-parallel ranks must plan with alike, although each measured for itself."""

import torch
import torch.distributed as dist


def least_of_ranks(nbytes: int, group: dist.ProcessGroup) -> int:
    """The smallest ``nbytes`` that any rank of a CPU process group has; collective.

    Ranks have unequal free memory when something else runs on one GPU. vLLM takes the minimum of
    the block counts they report, but by then each rank has planned its units, and plans from
    different sizes name different memory.
    """
    least = torch.tensor([nbytes], dtype=torch.int64)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    return int(least)
