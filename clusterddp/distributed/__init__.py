"""torch.distributed for a rank: process group, DDP and small collectives; nothing about steps or data."""
