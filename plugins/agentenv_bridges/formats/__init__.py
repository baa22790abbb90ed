"""Formats of other libraries, each written from trajectories and read back."""
