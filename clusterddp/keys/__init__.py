"""Dataclasses whose fields are the keys of a definition: read from YAML, written back, and described for editors."""
