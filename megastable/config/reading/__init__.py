"""Reading a run file, and everything that can be wrong with one."""
