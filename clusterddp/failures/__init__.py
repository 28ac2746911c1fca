"""What went wrong: how ranks ended, hangs, stacks, nodes to leave out; nothing here starts or ends anything."""
