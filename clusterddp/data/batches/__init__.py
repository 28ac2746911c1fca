"""How samples become a batch, and how a worker sends it; which samples a batch has is decided in ``orders``."""
