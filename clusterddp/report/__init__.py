"""Where the time of a run went, and the page about a run, from its records; nothing is printed or asked here."""
