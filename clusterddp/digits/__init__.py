"""The packaged default job: handwritten digits."""
