"""What stands in for streams and for reduce-scatter on gloo."""
