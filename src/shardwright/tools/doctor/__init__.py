"""`shardwright doctor`: is this machine sane, and what does it reach? Writes the hardware file that `plan` reads."""
