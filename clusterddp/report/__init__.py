"""Where the time of a run went, and the page about a run, from its records. Pure: it neither prints nor asks."""
