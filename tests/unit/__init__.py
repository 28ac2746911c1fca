"""Tests of single modules in pytest's own process; nothing here starts a rank."""
