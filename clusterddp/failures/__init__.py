"""What went wrong: how ranks ended, hangs, stacks, nodes to leave out; no process starts or ends here."""
