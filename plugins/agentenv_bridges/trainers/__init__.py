"""Trainers of others that play our episodes on their own sampler, while they train."""
