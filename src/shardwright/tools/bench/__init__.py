"""`shardwright bench`: layouts, and other people's programs, timed in turn in the same ranks once the objective is proven."""
