"""Adapters for the training loops of other libraries. The core never imports them."""
