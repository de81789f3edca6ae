"""`shardwright doctor`: tests this machine, measures its speed, and writes the hardware file that `plan` reads."""
