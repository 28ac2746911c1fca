"""The job definition: reading, checking and writing a ``Job``, its secrets; nothing about running it."""
