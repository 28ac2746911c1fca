"""Histories of the protocol in a simulated world, played by the product's own code; nothing with real processes."""
