"""What a script logs: the values of a step as they are at the call of ``run.log()``; their reduction over the ranks."""
