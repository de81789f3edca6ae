"""The ranks of a run, their rendezvous, and the mesh."""
