"""Adapters for the training loops of other libraries; the core never imports them."""
