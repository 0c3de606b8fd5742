"""Reading a run file as an experienced reviewer would, before anything is built. Needs neither torch nor a GPU."""
