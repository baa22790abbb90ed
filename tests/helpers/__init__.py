"""What several test modules and benchmarks share."""
