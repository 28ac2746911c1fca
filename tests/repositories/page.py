from __future__ import annotations
def write_page(entries, measured): pass
