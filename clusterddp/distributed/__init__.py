"""torch.distributed for a rank: process group, DDP and small collectives. Steps and data belong elsewhere."""
