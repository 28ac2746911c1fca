"""Where the time of a run went: booking, ratios and advice, from its records; nothing is printed or asked here."""
