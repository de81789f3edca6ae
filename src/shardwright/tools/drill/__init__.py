"""`shardwright drill`: injects faults into a run, resumes it, and compares it with a run without faults."""
