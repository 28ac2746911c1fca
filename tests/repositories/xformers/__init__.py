"""In place of xFormers, which has no build for CPUs: what DINOv2 uses of it, in plain torch."""
