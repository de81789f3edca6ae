"""`shardwright drill`: breaks a run on purpose, lets it go on, and compares with one that nothing happened to."""
