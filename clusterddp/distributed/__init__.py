"""torch.distributed for a rank: process group, DDP and small collectives; no steps and no data."""
